"""Settings of a run on several machines: Slurm's section, and settings that contradict one another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.config.section import Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


class SlurmConfig(Section):
    """The job that ``launch.type=slurm`` submits: one task on each of ``trainer.nodes`` nodes."""

    args: tuple[str, ...] = Field(
        default=(), description="More options of sbatch, e.g. --partition=gpu, --gres=gpu:8, --time=08:00:00."
    )
    setup: tuple[str, ...] = Field(
        default=(), description="Lines of shell before the run: module load ..., source .venv/bin/activate."
    )
    save_seconds: Annotated[int, Field(ge=0)] = Field(
        default=120,
        description="Seconds before the job's time limit or its preemption at which it saves and is queued again; 0: "
        "not at all.",
    )


def machine_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between ``trainer.nodes`` and the launch section."""
    nodes, launch = recipe.trainer.nodes, recipe.launch
    for key, kind in (("ray_address", "ray"), ("ray_resources", "ray"), ("restarts", "ray")):
        if getattr(launch, key) and launch.type != kind:
            yield f"launch.{key} does nothing with launch.type={launch.type}"
    if launch.type != "local":
        for key in ("head", "port", "node_rank"):
            if getattr(launch, key):
                yield f"launch.{key} is chosen with launch.type={launch.type}, it cannot be set"
    if launch.type != "slurm" and launch.slurm != type(launch.slurm)():
        yield f"launch.slurm does nothing with launch.type={launch.type}"
    if launch.type != "local":
        return
    if nodes > 1 and launch.head is None:
        yield f"trainer.nodes={nodes} needs launch.head=HOST, the address of node 0"
    if launch.node_rank >= nodes:
        yield f"launch.node_rank={launch.node_rank} is not below trainer.nodes={nodes}"
    if nodes > 1 and recipe.trainer.type is None:
        yield f"trainer.nodes={nodes} does nothing with trainer.type=null"
    for key, value in (("head", launch.head), ("port", launch.port or None)):
        if nodes == 1 and value is not None:
            yield f"launch.{key}={value} does nothing with trainer.nodes=1"
