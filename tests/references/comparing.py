"""Compares a step of agentrl with the reference's."""

import pytest
import torch

from tests.references.learning import Learned
from tests.references.step import Outcome

RELATIVE = 2e-4  # of float32 sums over tokens, and of a ratio's exponent
ROUNDING = 5e-5  # of the largest gradient


def assert_same(found: Learned, expected: Outcome) -> None:
    """Fails if a gradient or a metric is another, and names the first one."""
    for key, value in (expected.metrics | expected.measured).items():
        assert key in found.metrics, f"the metric {key} is missing"
        assert found.metrics[key] == pytest.approx(value, rel=RELATIVE, abs=2e-6), key
    for kind in ("policy", "critic"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys(), kind
        largest = max((change.abs().max().item() for change in theirs.values()), default=0.0)
        assert not theirs or largest > 1e-6, "no gradient: nothing is compared"
        for key, change in theirs.items():
            torch.testing.assert_close(
                ours[key], change, rtol=RELATIVE, atol=ROUNDING * largest, msg=lambda text, key=key: f"{key}: {text}"
            )
