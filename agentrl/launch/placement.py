"""Decides which machine of a run does what: pure functions of the recipe.

Guarantees: the first ``trainer.nodes`` machines run trainer ranks, the next ``rollout.nodes`` run rollout workers only,
the next ``inference.nodes`` run servers only; the head (number 0) runs everything else, and the workers or servers too
where they have no machines of their own. Every worker and every server stands on exactly one machine. What a kind of
server cannot do is refused before anything starts.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED
from agentrl.inference.kinds.kind import server_kind

SIZES = ("tp", "pp", "dp", "ep")
HEAD = 0


@dataclass(frozen=True)
class Node:
    """One machine of a run.

    Attributes:
        rank: Number of the machine, ``launch.node_rank``.
        trains: Whether it runs trainer ranks.
        servers: Numbers of the inference servers that it runs beside nothing else; empty on machines that train.
        workers: Numbers of the rollout workers that it runs beside nothing else.
    """

    rank: int
    trains: bool
    servers: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Names the processes that run on a machine of this kind."""
        return "trainer ranks" if self.trains else "rollout workers" if self.workers else "servers"

    @property
    def what(self) -> str:
        """Names its processes with their numbers, for messages."""
        return " ".join([self.kind, ", ".join(map(str, self.servers or self.workers))]).strip()


def machines(recipe: Recipe) -> int:
    """Returns the number of machines that a run starts with."""
    return recipe.trainer.nodes + recipe.rollout.nodes + recipe.inference.nodes


def placed(recipe: Recipe) -> bool:
    """Whether the run's servers stand on machines of their own."""
    return recipe.inference.nodes > 0 and not recipe.inference.urls


def served_beyond(recipe: Recipe) -> bool:
    """Whether the run's servers are called from other machines, and so need its key."""
    return placed(recipe) or (recipe.rollout.nodes > 0 and not recipe.inference.urls)


def most_machines(recipe: Recipe) -> int:
    """Returns the number of machines that a run may grow to."""
    more = (recipe.inference.max_servers or 0) - recipe.inference.servers
    each = per_node(recipe)
    return machines(recipe) + (-(-more // each) if more > 0 and each else 0)


def per_node(recipe: Recipe) -> int:
    """Returns the largest number of servers on a machine of servers; 0 without such machines."""
    own = recipe.inference
    return -(-own.servers // own.nodes) if own.nodes else 0


def node(recipe: Recipe, rank: int) -> Node:
    """Returns what the machine of a number does; one that joined later than the first gets servers of its own.

    Raises:
        ValueError: The run has no such machine.
    """
    own, rollout, index = recipe.inference, recipe.rollout, rank - recipe.trainer.nodes
    if not 0 <= rank < most_machines(recipe):
        raise ValueError(f"launch.node_rank={rank}: the run has {words(recipe)}")
    if index < 0:
        return Node(rank, True)
    if index < rollout.nodes:
        return Node(rank, False, workers=tuple(range(index, rollout.workers, rollout.nodes)))
    index -= rollout.nodes
    if index < own.nodes:
        return Node(rank, False, tuple(range(index, own.servers, own.nodes)))
    begin = own.servers + (index - own.nodes) * per_node(recipe)
    return Node(rank, False, tuple(range(begin, min(begin + per_node(recipe), own.max_servers or 0))))


def nodes(recipe: Recipe) -> list[Node]:
    """Returns the machines that a run starts with."""
    return [node(recipe, rank) for rank in range(machines(recipe))]


def words(recipe: Recipe) -> str:
    """Names the keys that a run's number of machines follows from."""
    counts = {"rollout": recipe.rollout.nodes, "inference": recipe.inference.nodes}
    more = "".join(f" + {part}.nodes={count}" for part, count in counts.items() if count)
    return f"trainer.nodes={recipe.trainer.nodes}{more}"


def sizes(recipe: Recipe) -> dict[str, int]:
    """Returns the parallel sizes of a server that are above 1."""
    return {name: getattr(recipe.inference, name) for name in SIZES if getattr(recipe.inference, name) > 1}


def gpus(recipe: Recipe, one: Node) -> int:
    """Returns the GPUs that a machine needs; 0 on a CPU."""
    if recipe.launch.device != "cuda":
        return 0
    beside = 0 if one.rank != HEAD or placed(recipe) or recipe.inference.urls else recipe.inference.servers
    return (recipe.trainer.nproc if one.trains else 0) + (len(one.servers) + beside) * recipe.inference.ranks


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Returns the names of the NVIDIA GPUs that this process may use, without a library that would hold them.

    Args:
        devices: Folder of the device files.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [one.strip() for one in chosen.split(",") if one.strip()]
    return [str(number) for number in range(len([one for one in devices.glob("nvidia*") if one.name[6:].isdigit()]))]


def trainer_gpus(recipe: Recipe) -> int:
    """Returns the GPUs that trainer ranks take on a machine while servers run beside them; 0 on a CPU."""
    beside = recipe.trainer.type is not None and recipe.trainer.type not in SUPERVISED
    return recipe.trainer.nproc if beside and recipe.launch.device == "cuda" else 0


def devices_beside(recipe: Recipe, index: int, known: Sequence[str], before: int = 0) -> dict[str, str]:
    """Returns the environment that gives a server beside the trainer GPUs of its own; empty on a CPU.

    They follow those of the trainer's ranks. Where the machine has too few, they are shared in turn.

    Args:
        recipe: Recipe with the settings of the servers.
        index: Number of the server on the machine.
        known: Names of the machine's GPUs; empty where they are not known.
        before: Number of GPUs that other servers take before it.
    """
    if recipe.launch.device != "cuda" or not known:
        return {}
    count = recipe.inference.ranks
    first = trainer_gpus(recipe) + before + index * count
    return {"CUDA_VISIBLE_DEVICES": ",".join(known[(first + rank) % len(known)] for rank in range(count))}


def few_gpus(recipe: Recipe, known: Sequence[str]) -> str:
    """Says that processes of the head share GPUs; empty where each has its own, and where they are not known."""
    needed = gpus(recipe, node(recipe, HEAD))
    if not known or len(known) >= needed:
        return ""
    return (
        f"{needed} GPUs would be needed on this machine, which has {len(known)}: servers share those of trainer ranks"
    )


def visible_devices(recipe: Recipe, index: int) -> dict[str, str]:
    """Returns the environment that gives server ``index`` of a machine of servers its own GPUs; empty on a CPU."""
    if recipe.launch.device != "cuda":
        return {}
    count, given = recipe.inference.ranks, os.environ.get("CUDA_VISIBLE_DEVICES")
    known = given.split(",") if given else [str(number) for number in range((index + 1) * count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(known[index * count : (index + 1) * count])}


def server_problems(recipe: Recipe) -> Iterator[str]:
    """Yields what the kind of server cannot do of the placement that a recipe asks for."""
    own, can = recipe.inference, server_kind(recipe.inference.engine).capabilities
    engine = f"inference.engine={own.engine}"
    if placed(recipe) and not can.remote:
        yield f"inference.nodes={own.nodes}: {engine} cannot stand on other machines than the head"
    elif served_beyond(recipe) and not can.remote:
        yield f"rollout.nodes={recipe.rollout.nodes}: {engine} cannot be called from other machines than the head"
    reason = f" ({can.reasons['parallel']})" if "parallel" in can.reasons else ""
    for name, size in sizes(recipe).items():
        if name not in can.parallel:
            yield f"inference.{name}={size}: {engine} has no such size{reason}"
    if own.ep > 1 and own.ep not in (own.tp, own.tp * own.dp):
        yield f"inference.ep={own.ep}: experts are spread over a server's tensor ranks, inference.tp={own.tp}"
    if sizes(recipe) and own.urls:
        yield f"inference.{next(iter(sizes(recipe)))} does nothing with inference.urls, whose servers run already"


def head_problems(recipe: Recipe, heads: int, key_heads: int) -> Iterator[str]:
    """Yields sizes that do not divide the model's heads.

    Args:
        recipe: Recipe.
        heads: Attention heads of the model.
        key_heads: Number of the model's key heads.
    """
    size = recipe.inference.tp
    if heads % size:
        yield f"inference.tp={size} does not divide the model's {heads} attention heads"
    elif size % key_heads and key_heads % size:
        yield f"inference.tp={size} neither divides nor is a multiple of the model's {key_heads} key heads"


def lines(recipe: Recipe) -> list[str]:
    """Returns one line for each machine that says what it does; empty for a run on one machine."""
    if machines(recipe) == 1:
        return []
    return [f"{'head' if one.rank == HEAD else f'node {one.rank}'}: {_does(recipe, one)}" for one in nodes(recipe)]


def _does(recipe: Recipe, one: Node) -> str:
    first = one.rank * recipe.trainer.nproc
    ranks = f"trainer ranks {first}-{first + recipe.trainer.nproc - 1}" if recipe.trainer.nproc > 1 else f"rank {first}"
    rollouts = "" if recipe.rollout.nodes else ", rollouts"
    parts = [f"controller{rollouts}"] if one.rank == HEAD else []
    if one.rank == HEAD and not placed(recipe) and not recipe.inference.urls:
        parts.append(f"{recipe.inference.servers} x {recipe.inference.engine} server")
    if one.trains:
        parts.append(ranks)
    if one.workers:
        parts.append(f"rollout worker {', '.join(map(str, one.workers))}")
    if one.servers:
        split = "".join(f", {name} {size}" for name, size in sizes(recipe).items())
        parts.append(f"server {', '.join(map(str, one.servers))} ({recipe.inference.engine}{split})")
    needed = gpus(recipe, one)
    return "; ".join(parts) + (f"; {needed} GPU" if needed else "")
