"""Nodes of a Ray cluster that a run uses: their placement, and an actor on each that starts the run's launcher.

Guarantees: nothing of the run's data goes through Ray; a launcher ends with its actor, and an actor with its node or
with this process. What the cluster lacks is said before anything starts.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.launch.placement import gpus, machines, node, per_node

ANSWER_SECONDS = 30.0  # for an actor to answer
START_SECONDS = 180.0  # for an actor to start on its node
SHARED_SECONDS = 60.0  # for a file to be seen on another node
SHARED_POLL = 0.2
THREADS = "OMP_NUM_THREADS"


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

    def start(self, command: Sequence[str], env: Mapping[str, str], log: str, cwd: str) -> str:
        """Starts the command, which ends with this actor; returns why it cannot, empty if it does.

        Args:
            command: Program and arguments.
            env: Environment variables to add.
            log: File that the caller has written on its machine; what the command prints is appended.
            cwd: Working folder.
        """
        deadline = time.monotonic() + SHARED_SECONDS
        while not os.path.isfile(log):
            if time.monotonic() > deadline:
                return (
                    f"{log} is not there, which was just written: launch.run_dir must be on a disk that all nodes see"
                )
            time.sleep(SHARED_POLL)
        tethered = [sys.executable, "-m", "agentrl.launch.tethered", str(os.getpid()), *command]
        own = {name: value for name, value in os.environ.items() if name != THREADS}  # Ray sets one thread for actors
        try:
            with open(log, "ab") as file:
                self._process = subprocess.Popen(
                    tethered, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    env={**own, **env}, cwd=cwd, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def poll(self) -> int | None:
        """Returns the command's exit code; ``None`` while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the command, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@dataclass
class Placed:
    """An actor of one machine of the run.

    Attributes:
        rank: Number of the machine.
        actor: Ray actor on the node.
        group: Ray's placement group of its node.
        bundle: Number of the node in the group.
        asked: Answer of the actor that is awaited: its address before it starts, the exit code afterwards.
        started: Whether the launcher was started.
        tries: Times that it was placed again.
    """

    rank: int
    actor: Any
    group: Any
    bundle: int
    asked: Any = None
    started: bool = False
    tries: int = 0


def wanted(recipe: Recipe, rank: int = 0) -> dict[str, float]:
    """Returns the resources that a machine of a run needs of its node."""
    one, launch = node(recipe, rank), recipe.launch
    count = gpus(recipe, one) if one.kind != "servers" else per_node(recipe) * recipe.inference.ranks
    device = {"GPU": float(count)} if launch.device == "cuda" and count else {}
    more = {
        "trainer ranks": launch.ray_resources,
        "rollout workers": launch.ray_worker_resources,
        "servers": launch.ray_server_resources,
    }
    asked = {"CPU": 1.0, **device, **more[one.kind]}
    return asked | {name: max(least, asked[name]) for name, least in device.items()}


def place(recipe: Recipe) -> list[Placed]:
    """Gets a node of its own for each machine of a run.

    Raises:
        RayError: The cluster does not have them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [wanted(recipe, rank) for rank in range(machines(recipe))]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(recipe.launch.node_timeout):
        remove_placement_group(group)
        there = [f"{one['NodeName']}: {resource_words(one['Resources'])}" for one in ray.nodes() if one["Alive"]]
        raise RayError(
            f"the Ray cluster has no {_counted(bundles)} that are free within {recipe.launch.node_timeout:g} s "
            f"(launch.node_timeout); it has {'; '.join(there)}"
        )
    return [put(recipe, rank, group, rank) for rank in range(len(bundles))]


def put(recipe: Recipe, rank: int, group: Any, bundle: int, tries: int = 0) -> Placed:
    """Makes the actor of a machine on its node; where that is lost, on the one that Ray finds in its place.

    The actor takes the GPUs of the machine, so that Ray says in its environment which they are; its launcher inherits
    that. Without them it would see all of the node, also those of other jobs, or with an older Ray none.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor: Any = ray.remote(Host)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    gpus = wanted(recipe, rank).get("GPU", 0)
    made = actor.options(
        num_cpus=0, num_gpus=gpus, max_restarts=0, max_concurrency=4, scheduling_strategy=strategy
    ).remote()
    return Placed(rank, made, group, bundle, asked=made.address.remote(), tries=tries)


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds: dict[str, int] = {}
    for bundle in bundles:
        text = resource_words(bundle)
        kinds[text] = kinds.get(text, 0) + 1
    return " and ".join(f"{count} nodes with {text} each" for text, count in kinds.items())


def resource_words(resources: Mapping[str, float]) -> str:
    """Describes resources of Ray, without those that every node has."""
    shown = {name: value for name, value in resources.items() if not name.startswith("node:") and "memory" not in name}
    return ", ".join(f"{value:g} {name}" for name, value in sorted(shown.items())) or "nothing"


def ask(reference: Any, seconds: float = ANSWER_SECONDS) -> Any:
    """Returns an actor's answer.

    Raises:
        NodeLost: The actor is gone.
    """
    import ray
    from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayActorError

    try:
        return ray.get(reference, timeout=seconds)
    except (RayActorError, GetTimeoutError, ActorUnschedulableError, OutOfMemoryError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        why = said[0] if isinstance(error, OutOfMemoryError) else said[-1]  # what else it says is advice to Ray's users
        raise NodeLost(f"a node of the run is gone: {why}") from error


def answered(reference: Any) -> bool:
    """Whether an actor has answered, or is gone."""
    import ray

    return bool(ray.wait([reference], timeout=0)[0])


def runs(one: Placed) -> bool:
    """Whether the launcher of a machine runs."""
    try:
        return one.started and ask(one.actor.poll.remote()) is None
    except NodeLost:
        return False


def stop(one: Placed) -> None:
    """Tells the launcher of a machine to end."""
    one.actor.signal.remote(signal.SIGTERM)
