"""Holds the references themselves to published values (the project's reference figures), and their model to Llama."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.references.credit import Entry, Turn, generalised, group_relative, leave_one_out, whitened
from tests.references.llama import distributions, shape_of, weights_of
from tests.references.losses import Surrogate, clipped, dual_clipped, k1, k2, k3, most_stable, soft_gate, value_loss

LOGP = [[-1, -0.5, -2], [-0.7, -1.2]]
PROX = [[-1.2, -0.6, -1.5], [-0.7, -1]]
BEHAVE = [[-1.1, -0.9, -1.4], [-0.5, -1.3]]
ADVANTAGES = [[1.0, 1, -1], [-0.5, 2]]


def losses(surrogate: Surrogate, *, shift: float = 0.0, advantages: list[list[float]] = ADVANTAGES) -> list[float]:
    return [
        surrogate(torch.tensor(logp + shift - prox).double().exp(), advantage, torch.tensor(logp))[0].item()
        for row in zip(LOGP, PROX, advantages, strict=True)
        for logp, prox, advantage in zip(*row, strict=True)
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("surrogate", "expected"),
    [(clipped(0.2, 0.2), -0.528526), (clipped(0.2, 0.28), -0.532807), (soft_gate(1.0, 1.05), -1.098970)],
)
def test_a_surrogate_is_the_published_one(surrogate: Surrogate, expected: float) -> None:
    assert mean(losses(surrogate)) == pytest.approx(expected, abs=1e-5)


def test_a_dual_clip_is_the_published_one() -> None:
    negative = [[-abs(value) for value in row] for row in ADVANTAGES]
    assert mean(losses(dual_clipped(0.2, 0.2, 3.0), shift=2.0, advantages=negative)) == pytest.approx(3.3, abs=1e-5)


@pytest.mark.parametrize(("cap", "expected"), [(5.0, -0.730947), (1.2, -0.648746)])
def test_a_truncated_correction_is_the_published_one(cap: float, expected: float) -> None:
    plain = losses(clipped(0.2, 0.2))
    flat = [p - b for row in zip(PROX, BEHAVE, strict=True) for p, b in zip(*row, strict=True)]
    weights = [min(math.exp(one), cap) for one in flat]
    assert mean([w * x for w, x in zip(weights, plain, strict=True)]) == pytest.approx(expected, abs=1e-5)


def test_estimators_of_the_kl_are_the_published_ones() -> None:
    for logp, ref, expected in ((-1.0, -1.5, (0.5, 0.125, 0.106531)), (-2.0, -1.0, (-1, 0.5, 0.718282))):
        found = [one(torch.tensor(logp, dtype=torch.float64), ref).item() for one in (k1, k2, k3)]
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_critics_loss_is_the_published_one() -> None:
    rows = ((0.5, 0.0, 1.0), (1.0, 0.9, 0.0))
    found = [value_loss(torch.tensor(v, dtype=torch.float64), old, goal, 0.2).item() for v, old, goal in rows]
    assert mean(found) == pytest.approx(0.41)


def test_a_second_moment_mask_drops_the_largest_first() -> None:
    assert most_stable([0.01, 4.0, 0.09, 0.0], 0.04) == [True, False, True, True]
    assert most_stable([0.01, 4.0, 0.09, 0.0], 0.01) == [True, False, False, True]


def entries(rewards: list[float]) -> list[Entry]:
    return [Entry(("g", "x"), reward, [Turn(reward, [0.0], [])]) for reward in rewards]


def test_advantages_of_a_group_are_the_published_ones() -> None:
    rewards = entries([1, 0, 0, 0])
    assert [v for (v,) in group_relative("group")(rewards)] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert [v for (v,) in leave_one_out(rewards)] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert leave_one_out(entries([1])) == [[0.0]]
    assert group_relative("group")(entries([1, 1, 1, 1])) == [[0.0]] * 4
    assert whitened([1, 1, 2]) == pytest.approx([-0.57735, -0.57735, 1.1547], abs=1e-5)


@pytest.mark.parametrize(
    ("turns", "after", "expected"),
    [
        ([Turn(1.0, [0.2, 0.3, 0.4], [])], 0.0, [0.42424, 0.492, 0.6]),
        ([Turn(1.0, [0.2, 0.3, 0.4], [])], 0.5, [0.65752, 0.816, 1.05]),
        ([Turn(0.0, [0.1], [1]), Turn(1.0, [0.4], [])], 0.0, [0.692, 0.6]),
        ([Turn(1.0, [0.1, 0.2], [])], 0.0, [0.656, 0.8]),
    ],
)
def test_generalised_advantages_are_the_published_ones(turns: list[Turn], after: float, expected: list[float]) -> None:
    turns[-1].after = after
    assert generalised(0.9, 0.8)([Entry(("g", "x"), 1.0, turns)])[0] == pytest.approx(expected, abs=1e-5)


def test_the_reference_model_is_llama(models: Path) -> None:
    ids = list(range(3, 40, 2))
    model = AutoModelForCausalLM.from_pretrained(models / "policy", dtype=torch.float64)
    with torch.no_grad():
        theirs = (model(torch.tensor([ids])).logits[0] / 0.7).log_softmax(-1)
        ours = distributions(weights_of(models / "policy"), shape_of(models / "policy"), ids, 0.7)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)  # transformers normalises in float32
