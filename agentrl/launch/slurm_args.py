"""Compares the options of sbatch that a recipe gives with what its run needs of a node.

Guarantees: pure; an option that the job's script sets itself, and a number of GPUs on a node that is too small, are
refused before anything is queued, with the option as it was written. What an option does not say is left to Slurm.
"""

import re
from collections.abc import Iterator, Sequence

from agentrl.config.recipe import Recipe
from agentrl.launch.placement import Node, gpus, nodes

_OURS = {
    "nodes": r"--nodes|-N",
    "tasks": r"--ntasks|-n|--ntasks-per-node",
    "array": r"--array|-a",
}  # set by the script, or with no meaning for one run
_REASONS = {
    "nodes": "the number of nodes follows from trainer.nodes, rollout.nodes and inference.nodes",
    "tasks": "a node runs one task, the launcher, which starts trainer.nproc ranks",
    "array": "a job is one run, with one folder",
}
_GPUS = (
    r"--gres[= ](?:\S*,)?gpu(?::[a-zA-Z]\w*)?(?::(\d+))?(?:,|\(|$)",
    r"--gpus-per-(?:node|task)[= ](?:[a-zA-Z]\w*:)?(\d+)$",
)


def arg_problems(recipe: Recipe) -> Iterator[str]:
    """Yields what is wrong with ``launch.slurm.args``, ``server_args`` and ``worker_args``."""
    slurm, every = recipe.launch.slurm, nodes(recipe)
    servers, workers = [one for one in every if one.servers], [one for one in every if one.workers]
    apart = (*(servers if slurm.server_args else ()), *(workers if slurm.worker_args else ()))
    with_main = [one for one in every if one not in apart]
    for name, args, those in (
        ("args", slurm.args, with_main),
        ("server_args", slurm.server_args, servers),
        ("worker_args", slurm.worker_args, workers),
    ):
        yield from _ours(name, args)
        if those:
            yield from _few_gpus(recipe, name, args, those)


def _ours(name: str, args: Sequence[str]) -> Iterator[str]:
    for arg in args:
        for kind, options in _OURS.items():
            if re.match(rf"(?:{options})(?:[= ]|\d|$)", arg.strip()):
                yield f"launch.slurm.{name} has {arg}: {_REASONS[kind]}"


def _few_gpus(recipe: Recipe, name: str, args: Sequence[str], those: Sequence[Node]) -> Iterator[str]:
    most = max(those, key=lambda one: gpus(recipe, one))
    needed = gpus(recipe, most)
    for arg in args:
        for pattern in _GPUS:
            found = re.match(pattern, arg.strip())
            if found is not None and int(found[1] or 1) < needed:
                yield f"launch.slurm.{name} has {arg}, and node {most.rank} ({most.kind}) needs {needed} GPUs"
