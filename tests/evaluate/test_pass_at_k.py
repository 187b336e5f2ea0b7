"""Pass@k: against every subset, and without bias for any number of valid samples."""

import itertools
import random
from fractions import Fraction

import pytest

from agentrl.evaluate.pass_at_k import pass_at_k, passes


@pytest.mark.parametrize("samples", range(1, 8))
def test_it_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for right in range(samples + 1):
        values = [1] * right + [0] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(values, k))
            expected = Fraction(sum(map(max, subsets)), len(subsets))
            assert pass_at_k(samples, right, k) == pytest.approx(float(expected), abs=1e-12)


def test_it_has_no_bias_where_some_samples_are_invalid() -> None:
    """Tasks of 6 samples, each valid with 0.7 and right with 0.3: pass@2 is 1 - 0.7^2 however many are valid."""
    rng = random.Random(0)
    values = {str(task): [float(rng.random() < 0.3) for _ in range(6) if rng.random() < 0.7] for task in range(20000)}
    found = passes(values, 6)
    for k in (1, 2, 3):
        mean = sum(found[f"pass@{k}"].values()) / len(found[f"pass@{k}"])
        assert mean == pytest.approx(1 - 0.7**k, abs=0.01)


def test_what_cannot_be_estimated_is_absent_or_refused() -> None:
    assert list(passes({"a": [1.0, 0.0], "b": [0.0]}, 4)) == ["pass@1", "pass@2"]
    assert passes({"a": [1.0, 0.0], "b": [0.0]}, 4)["pass@2"] == {"a": 1.0}
    assert passes({"a": []}, 2) == {} and passes({}, 2) == {}
    for wrong in ((2, 1, 3), (2, 3, 1), (2, 1, 0)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*wrong)
