"""Context parallelism without ranks: the parts of all ranks together are one rank's attention."""

import random

import pytest
import torch
from torch import Tensor

from agentrl.train.context_parallel import ROUND, Deal, deal
from agentrl.train.row_attention import BLOCK, block_mask
from agentrl.train.tree_attention import OwnTiles, TreeTiles, blocks, tree_attention

HEADS, KEY_HEADS, SIZE = 3, 1, 8  # a number of heads that no number of ranks divides


def forest(length: int, seed: int) -> Tensor:
    """Ends of a random forest."""
    rng = random.Random(seed)
    ends = list(range(1, length + 1))

    def grow(first: int, end: int) -> None:
        while first < end:
            after = rng.randint(first + 1, end) if rng.random() < 0.4 else end
            node = first
            while node < after and rng.random() < 0.9:
                ends[node] = after
                node += 1
            ends[first] = after
            grow(max(node, first + 1), after)
            first = after

    grow(0, length)
    return torch.tensor(ends)


def dealt(ends: Tensor, ranks: int) -> tuple[Deal, list[OwnTiles]]:
    found = blocks(ends.tolist())
    made = deal([range(b.start, b.end) for b in found], [float(len(b) * b.keys) for b in found], ranks, ROUND)
    mine = [[b for b in found if int(made.owner[b.start]) == rank] for rank in range(ranks)]
    return made, [
        OwnTiles(ends, own, made.local, made.gathered, rank * made.most, made.most) for rank, own in enumerate(mine)
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("length", [1, 40, 700])
def test_ranks_together_compute_the_attention_and_gradients_of_one(length: int, ranks: int) -> None:
    ends = forest(length, length)
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(length, heads, SIZE, generator=generator, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    above = torch.randn(length, HEADS, SIZE, generator=generator)
    whole = tree_attention(*inputs, TreeTiles(ends), 0.3)
    expected = torch.autograd.grad(whole, inputs, above)
    made, tiles = dealt(ends, ranks)
    gathered = [torch.zeros(ranks * made.most, one.shape[1], SIZE).index_copy(0, made.gathered, one) for one in inputs]
    result = torch.zeros_like(whole)
    for rank, own in enumerate(tiles):
        part = slice(rank * made.most, (rank + 1) * made.most)
        found = tree_attention(gathered[0][part], gathered[1], gathered[2], own, 0.3)
        chosen = made.owner == rank
        result = result + torch.zeros_like(whole).index_copy(0, torch.nonzero(chosen)[:, 0], found[made.local[chosen]])
    assert torch.equal(result, whole) or (result - whole).abs().max() < 1e-6
    for gradient, wanted in zip(torch.autograd.grad(result, inputs, above), expected, strict=True):
        assert (gradient - wanted).abs().max() < 1e-5


def test_every_token_has_one_place_and_costs_are_even() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(1, 128) for _ in range(60)]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    parts = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    costs = [length * rng.random() for length in lengths]
    made = deal(parts, costs, 4, ROUND)
    assert len(set(made.gathered.tolist())) == sum(lengths) and int(made.local.max()) < made.most
    loads = [sum(c for part, c in zip(parts, costs, strict=True) if int(made.owner[part.start]) == r) for r in range(4)]
    assert max(loads) - min(loads) <= max(costs)


def test_a_flex_mask_of_some_blocks_is_those_rows_of_the_whole_mask() -> None:
    ends = forest(6 * BLOCK, 5)
    node, key = torch.arange(len(ends))[:, None], torch.arange(len(ends))[None, :]
    expected = (key <= node) & (node < ends[key])
    for own in (torch.tensor([4, 1]), torch.tensor([5, 0, 3])):
        mask = block_mask(ends, own)
        rows = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in own.tolist()])
        queries = torch.arange(len(rows))[:, None]
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), queries, key)
        assert torch.equal(seen, expected[rows])
        listed = mask.to_dense()[0, 0].bool()  # blocks that are computed
        by_block = expected[rows].view(len(own), BLOCK, -1, BLOCK).transpose(1, 2).flatten(2).any(-1)
        assert torch.equal(listed & by_block, by_block), "no block with an allowed pair is left out"
        full = torch.zeros_like(listed)
        for row in range(len(own)):
            full[row, mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].long()] = True
        all_allowed = expected[rows].view(len(own), BLOCK, -1, BLOCK).transpose(1, 2).flatten(2).all(-1)
        assert torch.equal(full & all_allowed, full), "a block that is not masked inside has no masked pair"
