"""Settings of a run on several machines that contradict one another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


def machine_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between ``trainer.nodes`` and the launch section."""
    nodes, launch = recipe.trainer.nodes, recipe.launch
    if nodes > 1 and launch.head is None:
        yield f"trainer.nodes={nodes} needs launch.head=HOST, the address of node 0"
    if launch.node_rank >= nodes:
        yield f"launch.node_rank={launch.node_rank} is not below trainer.nodes={nodes}"
    if nodes > 1 and recipe.trainer.type is None:
        yield f"trainer.nodes={nodes} does nothing with trainer.type=null"
    for key, value in (("head", launch.head), ("port", launch.port or None)):
        if nodes == 1 and value is not None:
            yield f"launch.{key}={value} does nothing with trainer.nodes=1"
