"""Attention by blocks against a dense mask in float64, and what is computed for it."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.models.prefix_tree import PrefixTree
from agentrl.models.tree_mask import tree_mask
from agentrl.train.tree_attention import QUERIES, TILE, TreeTiles, blocks, tree_attention

SCALE = 0.3


def forest(*trees: list[list[int]]) -> Tensor:
    """Returns ``ends`` of trees that lie end to end."""
    ends: list[int] = []
    for sequences in trees:
        tree, first = PrefixTree(), len(ends)
        for sequence in sorted(sequences):
            tree.add(sequence)
        ends += [first + end for end in tree.ends]
    return torch.tensor(ends)


def group(rng: random.Random, prompt: int, answers: list[int]) -> list[list[int]]:
    """Makes a prompt and answers that differ from their first token."""
    trunk = [rng.randrange(10**6) for _ in range(prompt)]
    return [[*trunk, 10**6 + index, *(rng.randrange(10**6) for _ in range(n - 1))] for index, n in enumerate(answers)]


def random_forest(seed: int) -> Tensor:
    """Some that fork often and late, groups of answers, lone sequences, single tokens."""
    rng = random.Random(seed)
    trees: list[list[list[int]]] = []
    for _ in range(rng.randint(1, 5)):
        match rng.randrange(4):
            case 0:  # forks at every token
                trees.append([[rng.randrange(2) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(1, 40))])
            case 1:
                trees.append(group(rng, rng.randint(1, 200), [rng.randint(1, 150) for _ in range(rng.randint(2, 8))]))
            case 2:
                trees.append([[rng.randrange(10**6) for _ in range(rng.choice([1, QUERIES, QUERIES + 1, 400]))]])
            case _:  # a long trunk with ever longer branches
                trunk = [rng.randrange(10**6) for _ in range(300)]
                trees.append([trunk[: 30 * n] + [10**6 + n] * rng.randint(1, 90) for n in range(1, 10)])
    return forest(*trees)


def dense(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    states = (states.transpose(0, 1)[None] for states in (query, key, value))
    out = scaled_dot_product_attention(*states, attn_mask=tree_mask(ends[None]), scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


def inputs(length: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads[0], 16), (heads[1], 16), (heads[1], size), (heads[0], size))
    return [torch.randn(length, *shape, generator=generator).to(dtype) for shape in shapes]


def results(attend: object, states: list[Tensor], mask: object) -> list[Tensor]:
    """Returns the attention's output and its three gradients."""
    *leaves, grad = states
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = attend(*leaves, mask)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, leaves, grad)]


def tiled(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    return tree_attention(query, key, value, TreeTiles(ends), SCALE)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_attention_with_the_dense_mask(seed: int) -> None:
    ends = random_forest(seed)
    states = inputs(len(ends), torch.float32)
    exact = results(dense, [state.double() for state in states], ends)
    for found, wanted in zip(results(tiled, states, ends), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "size"), [((3, 3), 16), ((6, 1), 16), ((4, 2), 8)])
def test_any_number_of_heads_and_another_size_of_values(heads: tuple[int, int], size: int) -> None:
    ends = random_forest(3)
    states = inputs(len(ends), torch.float32, heads, size)
    exact = results(dense, [state.double() for state in states], ends)
    for found, wanted in zip(results(tiled, states, ends), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_in_bfloat16_it_errs_as_torch_does(seed: int) -> None:
    ends = random_forest(seed)
    states = inputs(len(ends), torch.bfloat16)
    exact = results(dense, [state.double() for state in states], ends)
    ours, theirs = results(tiled, states, ends), results(dense, states, ends)
    for found, torchs, wanted in zip(ours, theirs, exact, strict=True):
        assert found.dtype == torch.bfloat16
        error, bound = (found - wanted).abs(), (torchs - wanted).abs()
        assert error.mean() <= 2 * bound.mean()
        assert error.max() <= 4 * bound.max()


@pytest.mark.parametrize("seed", range(12))
def test_blocks_cover_every_node_once_and_its_path_is_its_ancestors(seed: int) -> None:
    ends = random_forest(seed)
    seen = tree_mask(ends[None])[0, 0]
    covered = torch.zeros(len(ends), dtype=torch.long)
    for block in blocks(ends.tolist()):
        covered[block.start : block.end] += 1
        path = torch.zeros(len(ends), dtype=torch.bool)
        for part in block.path:
            path[part.start : part.stop] = True
        assert len(block) <= QUERIES
        assert block.keys == len(block) + int(path.sum())
        for node in range(block.start, block.end):
            assert torch.equal(seen[node, : block.start], path[: block.start])
    assert torch.equal(covered, torch.ones_like(covered))


def scores(ends: Tensor) -> int:
    """Counts the computed scores of one head."""
    return sum(tile.bias.numel() for tile in TreeTiles(ends).tiles)


def test_few_scores_are_computed_in_vain() -> None:
    rng = random.Random(0)
    answers = forest(group(rng, 170, [80] * 8), group(rng, 150, [80] * 8))
    assert scores(answers) < 1.3 * int(tree_mask(answers[None]).sum()) < 0.2 * len(answers) ** 2
    lone = forest([[rng.randrange(10**6) for _ in range(2000)]])
    assert scores(lone) < 1.1 * int(tree_mask(lone[None]).sum())


def test_tiles_stay_small_however_many_blocks_there_are() -> None:
    rng = random.Random(0)
    tiles = TreeTiles(forest(*(group(rng, 100, [60] * 8) for _ in range(10)))).tiles
    assert len(tiles) < 20, "blocks of like sizes share a tile"
    assert all(tile.bias.numel() <= TILE for tile in tiles)


def test_what_is_kept_for_the_backward_pass_grows_with_the_tokens_alone() -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    ends = forest([list(range(1500))])
    query, key, value, _ = (state.requires_grad_() for state in inputs(len(ends), torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tiled(query, key, value, ends)
    assert sum(kept) == query.numel() + key.numel() + value.numel()
