"""Which placements of a tensor give a rank one block; the exchange is tested with a checkpoint in ``test_meshes``."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from agentrl.train.plain_shards import _blocks


def strided(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


@pytest.mark.parametrize(
    ("sizes", "placements", "expected"),
    [
        ((2, 2), (Shard(0), Shard(1)), None),
        ((2, 2), (strided(0, 2), Shard(0)), None),  # FSDP2 of what a tensor rank holds
        ((2, 3, 2), (Replicate(), strided(0, 2), Shard(0)), None),
        ((2,), (strided(1, 2),), (Shard(1),)),  # fused: a part of gate and a part of up
        ((2, 2), (Shard(0), strided(1, 2)), (Shard(0), Shard(1))),
        ((4, 2), (strided(0, 2), strided(1, 2)), (Shard(0), Shard(1))),
        ((2, 2), (strided(0, 4), Shard(0)), (Shard(0), Shard(0))),
        ((2, 2), (Replicate(), Replicate()), None),
    ],
)
def test_what_gives_a_rank_several_blocks_is_replaced(
    sizes: tuple[int, ...], placements: tuple[Placement, ...], expected: tuple[Placement, ...] | None
) -> None:
    tensor: Any = SimpleNamespace(placements=placements, device_mesh=SimpleNamespace(size=sizes.__getitem__))
    assert _blocks(tensor) == (expected or placements)
