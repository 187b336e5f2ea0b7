"""Boxes of weights: what a conversion makes without computing anything, and what a rank has of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.weights import file_cuts
from agentrl.weights.file_cuts import Cut, find_cuts
from agentrl.weights.file_names import FileWeight, file_weights
from agentrl.weights.gather import full_tensor
from tests.models.families import small_model

SHAPE = (4, 6, 5)


def converted(make: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Cut | None]:
    """Returns what a conversion makes of a weight of consecutive numbers, and the box that is found."""
    weight = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    monkeypatch.setattr(file_cuts, "revert_weight_conversion", lambda model, given: {"made": make(given["w"])})
    return make(weight), find_cuts(None, {"w": weight}).get("made")


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w[2],
        lambda w: w[1:3],
        lambda w: w.chunk(4)[3].squeeze(0),
        lambda w: w.chunk(2, dim=1)[1].contiguous(),
        lambda w: w.chunk(2, dim=1)[1].contiguous()[3],
        lambda w: w[1].transpose(0, 1).contiguous(),
        lambda w: w[3].chunk(2)[0].t().clone(),
        lambda w: w[0, 2:4, 1:4],
        lambda w: w[0, :, 3],
        lambda w: w.permute(2, 0, 1),
        lambda w: w[1:2, 2:3],
    ],
)
def test_views_of_a_weight_are_boxes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, cut = converted(make, monkeypatch)
    assert cut is not None
    assert torch.equal(cut.of(cut.weight), made)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w + 1,
        lambda w: torch.cat([w[:1], w[2:]]),
        lambda w: w[::2],
        lambda w: w.view(24, 5),
        lambda w: w.reshape(2, 2, 6, 5)[:, 1],
        lambda w: w.to(torch.bfloat16),
        lambda w: w[0].diagonal(),
        lambda w: w[0, 0].expand(3, 5),
    ],
)
def test_what_is_computed_or_no_box_is_left_to_the_conversion(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, cut = converted(make, monkeypatch)
    assert cut is None


@pytest.mark.parametrize("shape", [(1, 6, 5), (4, 1, 5), (4, 6, 1), (1, 1, 1)])
def test_dimensions_of_size_one_are_no_hindrance(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made, cut = converted(lambda w: w[-1], monkeypatch, shape)
    assert cut is None or torch.equal(cut.of(cut.weight), made)


@pytest.mark.parametrize("rows", [[(0, 4)], [(1, 2)], [(0, 1), (2, 4)], []])
@pytest.mark.parametrize("columns", [[(0, 6)], [(0, 2), (3, 5)], [(4, 6)]])
@pytest.mark.parametrize("box", [((2, 3), (0, 6), (0, 5)), ((0, 4), (1, 4), (2, 3)), ((1, 3), (3, 6), (0, 5))])
def test_a_part_of_the_weight_has_its_elements_of_the_box(rows: Any, columns: Any, box: Any) -> None:
    whole = torch.arange(120.0).view(SHAPE)
    cut = Cut(whole, box, tuple(at for at in (2, 1, 0) if box[at][1] - box[at][0] > 1))
    indices = [torch.tensor([i for a, b in one for i in range(a, b)], dtype=torch.long) for one in (rows, columns)]
    local, found = cut.part(whole[indices[0]][:, indices[1]], [rows, columns, [(0, 5)]])
    placed = torch.full_like(cut.of(whole), -1)
    if local.numel():
        grid = [torch.tensor([i for a, b in one for i in range(a, b)], dtype=torch.long) for one in found]
        placed[torch.meshgrid(*grid, indexing="ij")] = local
    held = torch.zeros(SHAPE, dtype=torch.bool)
    held[torch.meshgrid(*indices, torch.arange(5), indexing="ij")] = True
    expected = torch.where(cut.of(held), cut.of(whole), -1)
    assert torch.equal(placed, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_boxes_of_the_stacked_ones(name: str) -> None:
    model = small_model(name)
    made = [one for _, one in file_weights(model, model.named_parameters()) if isinstance(one, FileWeight)]
    assert made and all(one.cut is not None for one in made)
    for one in made:
        assert one.cut is not None and torch.equal(one.cut.of(one.cut.weight), full_tensor(one))
