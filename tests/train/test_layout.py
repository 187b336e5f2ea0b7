"""Tests packed rows against each sequence alone: blocks of the mask, logprobs, gradients, neighbouring rows."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from agentrl.bench.made_batch import TrainSequence
from agentrl.config.recipe import TrainerConfig
from agentrl.models.prefix_tree import PrefixTree
from agentrl.models.tree_mask import tree_mask
from agentrl.train.layout import Packed
from agentrl.train.micro_batch import MicroBatch
from agentrl.train.policy import Policy, load_model, shard
from agentrl.train.row_attention import BLOCK, block_mask, choose_attention, is_packed, use_tree_attention
from agentrl.train.rows import Row
from tests.train.test_policy import TEMPERATURE, gradients, plain_logprobs
from tests.train.test_rows import collated, random_sequences, rows_of, sequence

CPU = torch.device("cpu")


def packed_policy(folder: Path, mesh: DeviceMesh) -> Policy:
    model = load_model(folder)
    use_tree_attention(model)
    policy = Policy(model, TEMPERATURE, 16)
    shard(policy, mesh, torch.float32)
    return policy


def packed(sequences: list[TrainSequence], blocks: bool | None = None) -> MicroBatch:
    return collated(sequences, 10_000, Packed(4096.0, blocks=blocks))


def group_rows(sequences: list[TrainSequence]) -> list[Row]:
    rows = rows_of(sequences, 10_000, math.inf)
    assert 1 < len(rows) < len(sequences), "want neighbours, and trees with shared beginnings"
    return rows


def forest_ends(seed: int) -> Tensor:
    """Makes random trees end to end, filled up to whole blocks."""
    rng = random.Random(seed)
    ends: list[int] = []
    while len(ends) < 4 * BLOCK or len(ends) % BLOCK:
        tree = PrefixTree()
        trunk = list(range(rng.choice([1, 5, 150, 300])))
        for branch in range(rng.randint(1, 4)):
            tree.add([*trunk[: rng.randint(1, len(trunk))], 1000 + branch, *range(rng.choice([1, 20, 200]))])
        room = BLOCK - len(ends) % BLOCK
        if len(ends) > 4 * BLOCK and len(tree) > room:
            ends += range(len(ends) + 1, len(ends) + room + 1)
        else:
            ends += [len(ends) + end for end in tree.ends]
    return torch.tensor(ends)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_say_what_the_dense_mask_says(seed: int) -> None:
    ends = forest_ends(seed)
    dense = tree_mask(ends[None])[0, 0]
    mask = block_mask(ends)
    blocks = len(ends) // BLOCK
    partial, full = torch.zeros(blocks, blocks), torch.zeros(blocks, blocks)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    for kind, counts, keys in (
        (partial, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for query in range(blocks):
            kind[query, keys[0, 0, query, : counts[0, 0, query]].long()] = 1
    tiles = dense.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2)
    assert torch.equal(full.bool(), tiles.all(-1).all(-1))
    assert torch.equal((partial + full).bool(), tiles.any(-1).any(-1)), "and none is computed that nothing sees"
    nodes = torch.arange(len(ends))
    assert torch.equal(mask.mask_mod(nodes, nodes, nodes[:, None], nodes[None, :]), dense)
    torchs = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=BLOCK
    )
    for name in ("q", "full_q"):  # the backward pass takes keys' lists of queries
        counts, own = (getattr(made, f"{name}_num_blocks") for made in (torchs, mask))
        assert torch.equal(counts, own)
        for key in range(blocks):
            listed = [getattr(made, f"{name}_indices")[0, 0, key, : own[0, 0, key]] for made in (torchs, mask)]
            assert torch.equal(*listed)


def test_positions_start_anew_in_each_row() -> None:
    sequences = [sequence([1, 2, 3], [7, 8]), sequence([4, 5], [6, 7, 8])]
    batch = packed(sequences, blocks=True)
    assert batch.token_ids.shape == (1, BLOCK)
    assert batch.token_ids[0, :8].tolist() == [1, 2, 3, 7, 4, 5, 6, 7]
    assert batch.positions[0, :8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.sources.tolist() == [2, 3, 5, 6, 7]
    assert isinstance(batch.mask, BlockMask)
    nodes = torch.arange(BLOCK)
    seen = batch.mask.mask_mod(nodes, nodes, nodes[:, None], nodes[None, :])
    assert seen[4, :4].sum() == 0 and seen[8:].sum() == BLOCK - 8, "filling sees itself only"
    assert packed(sequences).token_ids.tolist() == [[1, 2, 3, 7, 4, 5, 6, 7]], "nothing is filled up"


@pytest.mark.parametrize("blocks", [True, False])
def test_packed_rows_give_the_logprobs_of_each_sequence_alone(tiny_model: Path, mesh: DeviceMesh, blocks: bool) -> None:
    sequences = random_sequences(3, 8)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    group_rows(sequences)
    batch = packed(sequences, blocks)
    assert batch.token_ids.shape[1] > 2 * BLOCK
    with torch.no_grad():
        alone = torch.cat([torch.stack(plain_logprobs(model, s)) for s in sequences])
        logprobs, _ = packed_policy(tiny_model, mesh)(batch)
    torch.testing.assert_close(logprobs, alone[batch.places], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_neighbour_changes_nothing(tiny_model: Path, mesh: DeviceMesh, blocks: bool) -> None:
    """Results are bitwise equal, because masked tokens take no part in the computation."""
    sequences = random_sequences(3, 8)
    rows = group_rows(sequences)
    policy = packed_policy(tiny_model, mesh)
    batch = packed(sequences, blocks)
    first, last = len(rows[0]), len(rows[0]) + len(rows[1])
    other = (batch.token_ids + 17) % 100
    other[:, first:last] = batch.token_ids[:, first:last]
    with torch.no_grad():
        before, after = policy(batch)[0], policy(replace(batch, token_ids=other))[0]
    mine = ((first <= batch.sources) & (batch.sources < last))[batch.trained]
    assert 0 < mine.sum() < len(mine)
    torch.testing.assert_close(before[mine], after[mine], atol=0, rtol=0)
    assert (before[~mine] - after[~mine]).abs().max() > 0.1


@pytest.mark.parametrize("budget", [150, 100_000])
def test_loss_and_gradient_of_packed_rows_are_those_of_padded_ones(
    tiny_model: Path, mesh: DeviceMesh, budget: int
) -> None:
    rng = random.Random(0)
    sequences = []
    for index, s in enumerate(random_sequences(4, 6)):
        count = len(s.token_ids)
        noise = [-5 + rng.gauss(0, 0.1) for _ in range(count)]
        sequences.append(replace(s, logprobs=noise, advantages=[rng.gauss(0, 1)] * count, group=index // 3))
    loss, gradient = gradients(tiny_model, mesh, sequences, budget, {"attention": "packed"})
    padded_loss, padded_gradient = gradients(tiny_model, mesh, sequences, budget, {"attention": "padded"})
    assert loss == pytest.approx(padded_loss, abs=1e-5)
    assert padded_gradient.abs().max() > 0.01
    torch.testing.assert_close(gradient, padded_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("blocks", [True, False])
def test_no_rows_take_part_and_train_nothing(tiny_model: Path, mesh: DeviceMesh, blocks: bool) -> None:
    with torch.no_grad():
        logprobs, entropies = packed_policy(tiny_model, mesh)(packed([], blocks))
    assert len(logprobs) == len(entropies) == 0


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cpu", True),
        ({}, "cuda", True),
        ({}, "mps", False),
        ({"compile": True}, "cpu", False),
        ({"compile": True}, "cuda", True),
        ({"attention": "packed", "compile": True}, "cpu", True),
        ({"attention": "padded"}, "cpu", False),
        ({"attention": "padded"}, "cuda", False),
    ],
)
def test_where_rows_are_packed(tiny_model: Path, given: dict[str, Any], device: str, expected: bool) -> None:
    model = load_model(tiny_model)
    choose_attention(model, TrainerConfig.model_validate(given), torch.device(device))
    assert is_packed(model) is expected


def test_a_model_with_an_attention_of_its_own_is_padded_or_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=1))
    choose_attention(model, TrainerConfig(), CPU)
    assert not is_packed(model)
    with pytest.raises(ValueError, match=r"Bloom.*trainer\.attention=padded"):
        choose_attention(model, TrainerConfig(attention="packed"), CPU)
