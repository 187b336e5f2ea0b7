"""Lays tensors out so that a checkpoint can name the part of each rank.

Tensor parallelism gives each rank a part of both halves of a fused matrix (gate and up of experts), which is no single
block of the whole. torch's distributed checkpoints describe a rank's part by one offset and one size, and refuse such
parts as overlapping, or would write them to the wrong place.

Guarantees: a tensor whose parts are blocks is passed on as it is; the others are exchanged between ranks, a collective,
into as many blocks of the same size; nothing else of a tree of tensors changes.
"""

import math
from typing import Any

from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map


def in_blocks(tensors: Any) -> Any:
    """Returns a tree of tensors whose parts on each rank are blocks; those that are blocks already are not copied."""
    return tree_map(lambda one: _laid_out(one, _blocks(one)) if isinstance(one, DTensor) else one, tensors)


def laid_out_as(tensors: Any, like: Any) -> Any:
    """Returns a tree of tensors with the layout of another tree, which has the same form."""
    return tree_map(
        lambda one, other: _laid_out(one, other.placements) if isinstance(one, DTensor) else one, tensors, like
    )


def _laid_out(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


def _blocks(tensor: DTensor) -> tuple[Placement, ...]:
    """Returns the placements of a tensor with each one that gives a rank several blocks replaced.

    FSDP2 over tensor parallelism marks its dimension as strided too, because the other dimension divides the tensor
    before it; the two together give each rank one block.
    """
    found = list(tensor.placements)
    for index, placement in enumerate(found):
        if isinstance(placement, _StridedShard):
            later = (
                tensor.device_mesh.size(at) for at in range(index + 1, len(found)) if _shards(found[at], placement)
            )
            if placement.split_factor != math.prod(later):
                found[index] = Shard(placement.dim)
    return tuple(found)


def _shards(placement: Placement, other: _StridedShard) -> bool:
    """Whether a placement divides the same dimension of the tensor as another."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == other.dim
