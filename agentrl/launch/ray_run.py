"""Runs a recipe on a Ray cluster: one launcher on each of ``trainer.nodes`` nodes, started by an actor of the node.

Guarantees: the launchers are the same processes as on machines without a scheduler (:mod:`agentrl.launch.machines`),
so nothing of a run's own data goes through Ray; what the cluster lacks is said before anything starts; at the end and
after Ctrl-C all launchers are told to end. Where Ray reports a dead node, the run starts again from its newest
checkpoint, ``launch.restarts`` times.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.render import render
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch.machine_recipe import recipe_of_machine, run_folder
from agentrl.launch.needed_packages import require_packages
from agentrl.train.checkpoint_state import latest_checkpoint

POLL_SECONDS = 0.5
END_SECONDS = 30.0  # for the other launchers when one has ended, and for all after SIGTERM
FAILED = 1  # exit code of a run with a failed process


class RayError(UserError):
    """The run cannot start on Ray; the message says why."""


class NodeLost(RuntimeError):
    """A node of the run died, or its launcher was killed."""


class Host:
    """Starts one command on the node of its actor, and tells how it fares."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Returns the node's address in the cluster."""
        import ray

        return ray.util.get_node_ip_address()

    def start(self, command: Sequence[str], env: Mapping[str, str], log: str, cwd: str) -> None:
        """Starts the command; what it prints is appended to ``log``."""
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, cwd=cwd, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """Returns the command's exit code; ``None`` while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the command, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@dataclass
class Group:
    """The nodes of a run.

    Attributes:
        hosts: An actor on each node, the head's first.
        placement: Ray's placement group.
    """

    hosts: list[Any]
    placement: Any


def run_on_ray(recipe: Recipe, console: Console, *, resume: bool) -> int:
    """Runs a recipe on the cluster, and shows what its head prints; returns the exit code.

    Args:
        recipe: Recipe as loaded, with ``launch.type=ray``.
        console: Console to print to.
        resume: Whether to continue the run of this name.

    Raises:
        RayError: There is no cluster, or it lacks what the run needs.
    """
    require_packages({"ray": "launch.type=ray"})
    run = run_folder(recipe)
    if run.exists() and not resume:
        raise RayError(f"a run named {recipe.name!r} exists in {run}: continue it with --resume, or choose name=NEW")
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.with_name(f"{recipe.name}.ray.yaml")
    file.write_text(render(recipe_of_machine(recipe), comments=False))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _connect(recipe)
    import ray

    try:
        return _with_restarts(recipe, file, console, resume=resume)
    except KeyboardInterrupt:
        console.print("\nstopped")
        return STOP_SIGNAL_CODE
    finally:
        ray.shutdown()


def _with_restarts(recipe: Recipe, file: Path, console: Console, *, resume: bool) -> int:
    """Runs the recipe, again from its newest checkpoint while it makes new ones; returns the exit code."""
    folder = run_folder(recipe) / "checkpoints"
    for left in range(recipe.launch.restarts, -1, -1):
        before = latest_checkpoint(folder)
        try:
            code, why = _once(recipe, file, console, resume=resume), "the run failed"
        except NodeLost as error:
            code, why = FAILED, str(error)
        newest = latest_checkpoint(folder)
        if code != FAILED or not left or newest in (None, before):
            if code == FAILED:
                console.print(why, style="red", markup=False, highlight=False)
            return code
        resume = True
        console.print(f"{why}; starting again from the newest checkpoint", markup=False, highlight=False)
    raise AssertionError


def _connect(recipe: Recipe) -> None:
    import ray

    address = recipe.launch.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        raise RayError(
            f"launch.type=ray: no Ray cluster answers at {address} ({said}); start one with ray start --head, and name "
            "it with launch.ray_address or RAY_ADDRESS"
        ) from error


def wanted(recipe: Recipe) -> dict[str, float]:
    """Returns the resources that a run needs of each node."""
    device = {"GPU": float(recipe.trainer.nproc)} if recipe.launch.device == "cuda" else {}
    return {"CPU": 1.0, **device, **recipe.launch.ray_resources}


def _once(recipe: Recipe, file: Path, console: Console, *, resume: bool) -> int:
    """Runs the recipe once, to its end or that of a node.

    Raises:
        NodeLost: A node died.
    """
    group = _place(recipe)
    log = run_folder(recipe).with_name(f"{recipe.name}.ray.log")
    try:
        _start(recipe, group, file, log, resume=resume)
        return _follow(group, log, console)
    finally:
        _end(group)


def _place(recipe: Recipe) -> Group:
    """Gets a node of its own for each launcher.

    Raises:
        RayError: The cluster does not have them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes, each = recipe.trainer.nodes, wanted(recipe)
    placement = placement_group([each] * nodes, strategy="STRICT_SPREAD")
    if not placement.wait(recipe.launch.node_timeout):
        remove_placement_group(placement)
        there = [f"{one['NodeName']}: {_words(one['Resources'])}" for one in ray.nodes() if one["Alive"]]
        raise RayError(
            f"the Ray cluster has no {nodes} nodes with {_words(each)} each that are free within "
            f"{recipe.launch.node_timeout:g} s (launch.node_timeout); it has {'; '.join(there)}"
        )
    actor: Any = ray.remote(Host)
    hosts = [
        actor.options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
        ).remote()
        for index in range(nodes)
    ]
    return Group(hosts, placement)


def _words(resources: Mapping[str, float]) -> str:
    shown = {name: value for name, value in resources.items() if not name.startswith("node:") and "memory" not in name}
    return ", ".join(f"{value:g} {name}" for name, value in sorted(shown.items())) or "nothing"


def _start(recipe: Recipe, group: Group, file: Path, log: Path, *, resume: bool) -> None:
    head = _ask(group.hosts[0].address.remote())
    for index, host in enumerate(group.hosts):
        command = [sys.executable, "-m", "agentrl", "recipe", "run", str(file), f"launch.node_rank={index}"]
        command += [f"launch.head={head}"] if len(group.hosts) > 1 else []
        command += ["--resume"] if resume and index == 0 else []
        mine = log if index == 0 else log.with_name(f"{log.stem}-{index}.log")
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "COLUMNS": str(os.environ.get("COLUMNS", 120))}
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "")  # Ray sets 1 for an actor's children
        with open(mine, "a") as out:
            out.write(f"$ {shlex.join(command)}\n")
        _ask(host.start.remote(command, {name: value for name, value in env.items() if value}, str(mine), os.getcwd()))


def _ask(reference: Any) -> Any:
    """Returns an actor's answer.

    Raises:
        NodeLost: The actor is gone.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(reference, timeout=END_SECONDS)
    except (RayActorError, GetTimeoutError) as error:
        said = str(error).strip().splitlines()
        raise NodeLost(f"a node of the run is gone: {said[-1] if said else type(error).__name__}") from error


def _follow(group: Group, log: Path, console: Console) -> int:
    """Shows what the head prints until it ends; returns its exit code.

    Raises:
        NodeLost: A node died, or the launcher of one was killed.
    """
    with open(log, encoding="utf-8", errors="replace") as lines:
        while True:
            codes = [_ask(host.poll.remote()) for host in group.hosts]
            for line in lines:
                console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
            if codes[0] is not None:
                if codes[0] < 0:
                    raise NodeLost(f"the head's launcher was killed by {signal.Signals(-codes[0]).name}")
                return codes[0]
            killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
            if killed:
                raise NodeLost(f"the launcher of node {killed[0]} was killed")
            time.sleep(POLL_SECONDS)


def _end(group: Group) -> None:
    """Ends all launchers that run, and gives the nodes back; those of dead nodes are gone already."""
    import ray
    from ray.util.placement_group import remove_placement_group

    deadline = time.monotonic() + END_SECONDS
    running = list(group.hosts)
    for host in running:
        host.signal.remote(signal.SIGTERM)
    while running and time.monotonic() < deadline:
        running = [host for host in running if _runs(host)]
        time.sleep(POLL_SECONDS if running else 0)
    for host in group.hosts:
        ray.kill(host)
    remove_placement_group(group.placement)


def _runs(host: Any) -> bool:
    try:
        return _ask(host.poll.remote()) is None
    except NodeLost:
        return False
