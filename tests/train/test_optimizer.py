"""Gradients are clipped by their norm up to the largest float32, on one rank and two, against float64."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from agentrl.train.optimizer import apply_gradients
from tests.train.clipping import MAX_NORM, gradients, step

ROOT = Path(__file__).parents[2]
LARGEST = torch.finfo(torch.float32).max
SCALES = [1e-3, 1.0, 1e10, 1e18, 3e19, 1e30, LARGEST]


def check(scale: float, norm: float, parameters: list[Tensor]) -> None:
    """Compares a step with float64: of gradients that are not clipped, and of those whose squares overflow."""
    made = gradients(scale)
    exact = math.sqrt(sum(one.square().sum().item() for one in made))
    assert norm == pytest.approx(exact, rel=1e-6)
    factor = min(1.0, MAX_NORM / exact)
    for found, gradient in zip(parameters, made, strict=True):
        torch.testing.assert_close(found.double(), -gradient * factor, rtol=2e-6, atol=0)


@pytest.mark.parametrize("scale", SCALES)
def test_the_norm_and_the_step_are_those_of_float64(scale: float) -> None:
    check(scale, *step(scale))


@pytest.mark.parametrize("scale", [1.0, LARGEST])
def test_they_are_on_two_ranks_too(scale: float, tmp_path: Path) -> None:
    given = [str(tmp_path / "store"), *("{}", "2"), str(scale), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.clipping", *(one.format(rank) for one in given)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for rank in range(2):
        check(scale, *torch.load(tmp_path / f"{rank}.pt"))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_changes_no_parameter(value: float) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([1.0, value]), torch.ones(1)
    assert not math.isfinite(apply_gradients(torch.optim.SGD(parameters, lr=1.0), 1.0))
    assert all(bool((one == 1).all()) and one.grad is None for one in parameters)
