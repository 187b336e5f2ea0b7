"""Windows and chunks along the branches of prefix trees: blocks and tiles against the dense mask, and whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.config.recipe import TrainerConfig
from agentrl.models.tree_mask import Reach, tree_mask
from agentrl.models.way import Way, form_of, set_form
from agentrl.train.layout import PlainPacked
from agentrl.train.layout_choice import layout_of
from agentrl.train.policy import Policy, load_model
from agentrl.train.row_attention import BLOCK, block_mask, choose_attention, is_packed
from agentrl.train.tree_attention import TreeTiles, tree_attention
from tests.train.test_families import CHUNK, TEMPERATURE, check, group, plain, write
from tests.train.test_layout import forest_ends

REACHES = [Reach(window=1), Reach(window=37), Reach(window=200), Reach(chunk=64), Reach(window=30, chunk=100)]


def depths(ends: Tensor) -> Tensor:
    """Depth of each node, from the definition: its number of ancestors."""
    return tree_mask(ends[None])[0, 0].sum(-1) - 1


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_blocks_say_what_the_dense_mask_says(reach: Reach) -> None:
    ends = forest_ends(1)
    positions = depths(ends)
    dense = tree_mask(ends[None], positions[None], reach)[0, 0]
    mask = block_mask(ends, positions=positions, reach=reach)
    nodes = torch.arange(len(ends))
    elementwise = mask.mask_mod(nodes, nodes, nodes[:, None], nodes[None, :])
    blocks = len(ends) // BLOCK
    allowed = torch.zeros_like(dense)
    parts = ((mask.kv_num_blocks, mask.kv_indices, elementwise), (mask.full_kv_num_blocks, mask.full_kv_indices, None))
    for counts, keys, inside in parts:
        assert counts is not None and keys is not None
        for row in range(blocks):
            for column in keys[0, 0, row, : int(counts[0, 0, row])].tolist():
                area = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                allowed[area] = True if inside is None else inside[area]
    assert torch.equal(allowed, dense)


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_tiles_attend_to_what_the_dense_mask_allows(reach: Reach) -> None:
    ends = forest_ends(2)
    positions = depths(ends)
    dense = tree_mask(ends[None], positions[None], reach)[0]
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(ends), 4, 8), (len(ends), 2, 8), (len(ends), 2, 8))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator)
    found = tree_attention(*inputs, TreeTiles(ends, positions, reach), 0.3)
    by_tiles = torch.autograd.grad(found, inputs, grad)
    query, key, value = (part.transpose(0, 1) for part in inputs)
    exact = scaled_dot_product_attention(query, key, value, attn_mask=dense, scale=0.3, enable_gqa=True)
    by_mask = torch.autograd.grad(exact.transpose(0, 1), inputs, grad)
    torch.testing.assert_close(found, exact.transpose(0, 1), atol=1e-5, rtol=1e-5)
    for one, other in zip(by_tiles, by_mask, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_keys_out_of_a_window_are_not_computed() -> None:
    ends = torch.full((600,), 600)
    positions = torch.arange(600)
    computed = [sum(len(tile.keys) for tile in TreeTiles(ends, positions, reach).tiles) for reach in (None, Reach(32))]
    assert computed[1] < computed[0] / 2


def prepared(name: str, folder: Path) -> Any:
    write(name, folder)
    model = load_model(folder, context=64)
    model.train()
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_moe"])
def test_packed_trees_are_exact(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    reference = plain(tmp_path, model)
    choose_attention(model, TrainerConfig(), torch.device("cpu"))
    assert is_packed(model)
    check(Policy(model, TEMPERATURE, CHUNK), layout_of(model), reference, group())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_plain_rows_are_exact(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    set_form(model, replace(form_of(model), way=Way("packed", why="it is tested")))
    layout = layout_of(model)
    assert isinstance(layout, PlainPacked)
    check(Policy(model, TEMPERATURE, CHUNK), layout, plain(tmp_path, model), group())
