"""Runs a recipe on a Ray cluster: one launcher on each node of the run, started by an actor of the node.

Guarantees: the launchers are the same processes as on machines without a scheduler (:mod:`agentrl.launch.machines`);
at the end and after Ctrl-C all launchers are told to end. A node of servers or rollout workers that dies is replaced
while the run goes on. Where a node of trainer ranks dies, or the run fails after a new checkpoint, it starts again from
the newest one, ``launch.restarts`` times. With ``inference.max_servers`` nodes are added while the cluster has them.
"""

import os
import secrets
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from agentrl.config.machines import OWN_RAY
from agentrl.config.recipe import Recipe
from agentrl.config.render import render
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch.addresses import why_unreachable
from agentrl.launch.machine_recipe import recipe_of_machine, run_folder
from agentrl.launch.needed_packages import require_packages
from agentrl.launch.placement import machines, most_machines, node
from agentrl.launch.ray_nodes import (
    START_SECONDS,
    THREADS,
    NodeLost,
    Placed,
    RayError,
    answered,
    ask,
    place,
    put,
    runs,
    stop,
    wanted,
)
from agentrl.launch.run_owner import ALIVE_SECONDS, read_owner
from agentrl.train.checkpoint_state import latest_checkpoint

OBJECT_STORE_BYTES = 80_000_000  # of a cluster that the run starts; nothing of its data goes through Ray
_TOKEN = "A cluster with tokens needs RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
MOST_WORDS = 500  # characters of what Ray says in several lines, such as two versions that differ
POLL_SECONDS = 0.5
END_SECONDS = 30.0  # for the other launchers when one has ended, and for all after SIGTERM
FAILED = 1  # exit code of a run with a failed process
MOST_TRIES = 5  # times that one machine of servers or workers is placed again


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
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job is started with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    connect(recipe)
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
        _until_free(run_folder(recipe))
    raise AssertionError


def _until_free(run: Path) -> None:
    """Waits until the launcher of a dead node no longer counts as alive, which its heartbeat's age tells."""
    deadline = time.monotonic() + 2 * ALIVE_SECONDS
    while read_owner(run).get("living") and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def connect(recipe: Recipe) -> None:
    """Connects to the cluster.

    Ray itself tries for minutes where nothing listens, so the address is tried before.

    Raises:
        RayError: No cluster answers.
    """
    address = recipe.launch.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    where = urlsplit(address if "://" in address else f"//{address}")
    if where.port is not None and (why := why_unreachable(where.hostname or "", where.port)):
        raise _no_cluster(address, why)
    if where.scheme == "ray":
        require_packages({"grpc": f"the Ray address {address}"})
    own = own_cluster(recipe) if recipe.launch.ray_address == OWN_RAY else {}
    if own:
        give_token()  # before Ray is imported, which reads it
    import ray
    from ray import exceptions

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    except (exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address, " ".join(str(error).split())[:MOST_WORDS]) from error


def own_cluster(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings of a cluster of this machine alone, which ends with this process."""
    known = ("CPU", "GPU")  # which Ray counts itself
    named = {name: count for name, count in wanted(recipe).items() if name not in known}
    return {"resources": named, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}


def give_token() -> None:
    """Gives the cluster that this process starts a token of its own, unless the user has chosen one or none."""
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _no_cluster(address: str, why: str) -> RayError:
    return RayError(
        f"launch.type=ray: no Ray cluster answers at {address} ({why}); start one with ray start --head, and name it "
        f"with launch.ray_address or RAY_ADDRESS. {_TOKEN}"
    )


def _once(recipe: Recipe, file: Path, console: Console, *, resume: bool) -> int:
    """Runs the recipe once, to its end or that of a node of trainer ranks.

    Raises:
        NodeLost: Such a node died.
    """
    cluster = _Cluster(recipe, file, console, resume=resume)
    try:
        return cluster.follow()
    finally:
        cluster.end()


class _Cluster:
    """The machines of one start of a run.

    Args:
        recipe: Recipe as loaded.
        file: File of the launchers' recipe.
        console: Console to print to.
        resume: Whether the run goes on from a checkpoint.

    Raises:
        RayError: The cluster lacks what the run needs.
    """

    def __init__(self, recipe: Recipe, file: Path, console: Console, *, resume: bool) -> None:
        self._recipe, self._file, self._console, self._resume = recipe, file, console, resume
        self._log = run_folder(recipe).with_name(f"{recipe.name}.ray.log")
        self._shown = self._log.stat().st_size if self._log.is_file() else 0  # by earlier starts
        self._placed = place(recipe)
        self._groups: list[Any] = [self._placed[0].group]
        self._growing: Any = None  # placement group of the next machine of servers
        self._next_rank = machines(recipe)
        self._head_address = ""

    def follow(self) -> int:
        """Starts all launchers and shows what the head prints until it ends; returns its exit code.

        Raises:
            NodeLost: A node of trainer ranks died, or the launcher of one was killed.
        """
        self._head_address = ask(self._placed[0].asked, START_SECONDS)
        for one in self._placed:
            ask(one.asked, START_SECONDS)
            self._start(one)
        with open(self._log, encoding="utf-8", errors="replace") as lines:
            lines.seek(self._shown)
            while True:
                code = self._look()
                for line in lines:
                    self._console.print(line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)
                if code is not None:
                    return code
                self._grow()
                time.sleep(POLL_SECONDS)

    def _start(self, one: Placed) -> None:
        """Starts the launcher of a machine whose actor lives.

        Raises:
            NodeLost: It does not.
            RayError: Its node sees other files than this machine.
        """
        several = most_machines(self._recipe) > 1
        command = [sys.executable, "-m", "agentrl", "recipe", "run", str(self._file), f"launch.node_rank={one.rank}"]
        command += [f"launch.head={self._head_address}"] if several else []
        command += ["--resume"] if self._resume and one.rank == 0 else []
        mine = self._log_of(one.rank)
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "COLUMNS": str(os.environ.get("COLUMNS", 120))}
        env[THREADS] = os.environ.get(THREADS, "")  # as on this machine
        with open(mine, "a") as out:
            out.write(f"$ {shlex.join(command)}\n")
        given = {name: value for name, value in env.items() if value}
        why = ask(one.actor.start.remote(command, given, str(mine), os.getcwd()), START_SECONDS)
        if why:
            raise RayError(f"node {one.rank} of the run cannot start its launcher: {why}")
        one.started, one.asked = True, one.actor.poll.remote()

    def _look(self) -> int | None:
        """Looks after all machines; returns the head's exit code when it has ended.

        Raises:
            NodeLost: A node of trainer ranks died, or the launcher of one was killed.
        """
        for index, one in enumerate(self._placed):
            if not answered(one.asked):
                continue
            trains = node(self._recipe, one.rank).trains
            try:
                code = ask(one.asked)
                if not one.started:
                    self._start(one)
                    self._say(f"node {one.rank} has a node again: its {node(self._recipe, one.rank).kind} start")
                    continue
                one.asked = one.actor.poll.remote()
            except (NodeLost, RayError) as error:
                if trains:
                    raise
                self._placed[index] = self._again(one, str(error))
                continue
            if code is None:
                continue
            if one.rank == 0 and code >= 0:
                return code
            if trains and code < 0:
                who = "the head's launcher" if one.rank == 0 else f"the launcher of node {one.rank}"
                raise NodeLost(f"{who} was killed by {signal.Signals(-code).name}")
            if not trains and code != 0:
                why = f"the launcher of node {one.rank} ended with code {code} ({self._log_of(one.rank)})"
                self._placed[index] = self._again(one, why)
        return None

    def _log_of(self, rank: int) -> Path:
        """Returns the file that the launcher of a machine prints to."""
        return self._log if rank == 0 else self._log.with_name(f"{self._log.stem}-{rank}.log")

    def _again(self, one: Placed, why: str) -> Placed:
        """Places a machine of servers or workers again, on its node or on another one.

        Raises:
            NodeLost: That was tried several times already.
        """
        import ray

        kind = node(self._recipe, one.rank).kind
        if one.tries == MOST_TRIES:
            raise NodeLost(f"node {one.rank} of {kind} cannot be kept: {why}")
        self._say(f"node {one.rank}: {why}; its {kind} are started elsewhere")
        ray.kill(one.actor)
        return put(self._recipe, one.rank, one.group, one.bundle, one.tries + 1)

    def _grow(self) -> None:
        """Adds a machine of servers where ``inference.max_servers`` allows it and the cluster has a node."""
        from ray.util.placement_group import placement_group

        if self._next_rank >= most_machines(self._recipe):
            return
        if self._growing is None:
            self._growing = placement_group([wanted(self._recipe, self._next_rank)], strategy="STRICT_SPREAD")
            self._groups.append(self._growing)
        if self._growing.wait(0):
            self._say(f"the cluster has a node for more servers: node {self._next_rank} joins")
            self._placed.append(put(self._recipe, self._next_rank, self._growing, 0))
            self._growing, self._next_rank = None, self._next_rank + 1

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Ends all launchers that run, and gives the nodes back; those of dead nodes are gone already."""
        import ray
        from ray.util.placement_group import remove_placement_group

        deadline = time.monotonic() + END_SECONDS
        running = list(self._placed)
        for one in running:
            stop(one)
        while running and time.monotonic() < deadline:
            running = [one for one in running if runs(one)]
            time.sleep(POLL_SECONDS if running else 0)
        for one in self._placed:
            ray.kill(one.actor)
        for group in self._groups:
            remove_placement_group(group)
