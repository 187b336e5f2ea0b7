"""A prefix tree against its definition: a node's ancestors are the tokens before it, and nothing else is."""

import random

import pytest
import torch

from agentrl.models.prefix_tree import PrefixTree
from agentrl.models.tree_mask import tree_mask


@pytest.mark.parametrize("in_order", [True, False])
def test_each_path_sees_exactly_its_own_sequence(in_order: bool) -> None:
    rng = random.Random(0)
    sequences = [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(40)]
    tree = PrefixTree()
    paths = [(s, tree.add(s)) for s in (sorted(sequences) if in_order else sequences)]
    mask = tree_mask(torch.tensor([tree.ends]))[0, 0]
    for sequence, path in paths:
        assert [tree.token_ids[node] for node in path] == sequence
        assert [tree.positions[node] for node in path] == list(range(len(sequence)))
        for depth, node in enumerate(path):
            assert mask[node].nonzero().flatten().tolist() == path[: depth + 1]


def test_sorted_sequences_store_each_distinct_prefix_once() -> None:
    rng = random.Random(1)
    sequences = [[rng.randrange(3) for _ in range(rng.randint(1, 6))] for _ in range(60)]
    tree = PrefixTree()
    for sequence in sorted(sequences):
        tree.add(sequence)
    assert len(tree) == len({tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)})
