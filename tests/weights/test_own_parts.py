"""Parts of sharded weights: which bytes of the whole weight a rank holds."""

import itertools

import pytest
import torch

from agentrl.weights.own_parts import Intervals, _chunk, runs


def whole(parts: Intervals) -> list[int]:
    return [index for first, end in parts for index in range(first, end)]


def chunk(indices: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """One of ``ranks`` chunks as torch divides, empty where there are fewer."""
    chunks = indices.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else indices[:0]


@pytest.mark.parametrize(("tensor", "shards"), [(1, 3), (2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("size", [1, 5, 6, 12, 13, 30])
def test_shards_of_a_tensor_rank_are_where_torch_puts_them(size: int, tensor: int, shards: int) -> None:
    """FSDP shards the part that a tensor rank holds; the placements name FSDP's mesh dimension first."""
    if size % tensor:
        return
    for part, shard in itertools.product(range(tensor), range(shards)):
        expected = chunk(chunk(torch.arange(size), part, tensor), shard, shards)
        found = _chunk(_chunk([(0, size)], shard, shards, tensor), part, tensor, 1)
        assert whole(found) == expected.tolist()


def test_fused_matrices_give_each_rank_a_chunk_of_both() -> None:
    assert _chunk([(0, 8)], 1, 2, 2) == [(2, 4), (6, 8)]


@pytest.mark.parametrize(
    "found",
    [
        [[(0, 4)], [(0, 3)], [(0, 5)]],
        [[(1, 3)], [(0, 3)], [(0, 5)]],
        [[(0, 1), (3, 4)], [(0, 3)], [(0, 5)]],
        [[(0, 4)], [(0, 3)], [(1, 2), (3, 5)]],
        [[(1, 3)], [(2, 3)], [(0, 5)]],
        [[], [(0, 3)], [(0, 5)]],
    ],
)
def test_runs_put_every_element_where_the_whole_weight_has_it(found: list[Intervals]) -> None:
    full = torch.arange(4 * 3 * 5).view(4, 3, 5)
    rows, columns, depth = (torch.tensor(whole(one), dtype=torch.long) for one in found)
    local = full[rows][:, columns][:, :, depth]
    written = torch.full((full.numel(),), -1)
    for place, part in runs(local, found, full.shape):
        written[place : place + part.numel()] = part.flatten()
    expected = torch.full_like(full, -1)
    for indices in itertools.product(rows.tolist(), columns.tolist(), depth.tolist()):
        expected[indices] = full[indices]
    assert torch.equal(written, expected.flatten())


def test_a_number_is_one_run() -> None:
    assert [(place, part.item()) for place, part in runs(torch.tensor(3.0), [], ())] == [(0, 3.0)]
