"""Pass@k: against every subset, and without bias for any number of valid samples."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from agentrl.evaluate.pass_at_k import of_subsets, pass_at_k, pass_hat_k
from agentrl.evaluate.votes import Vote, majority_at_k


def passes(values: dict[str, list[float]], samples: int) -> dict[str, dict[str, float]]:
    """``pass@k`` of all tasks, by name and task."""
    found: dict[str, dict[str, float]] = {}
    for task, own in values.items():
        for name, value in of_subsets([(None, one) for one in own], samples).items():
            if name.startswith("pass@"):
                found.setdefault(name, {})[task] = value
    return found


@pytest.mark.parametrize("samples", range(1, 8))
def test_it_is_the_share_of_subsets_with_a_right_sample(samples: int) -> None:
    for right in range(samples + 1):
        values = [1] * right + [0] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(values, k))
            expected = Fraction(sum(map(max, subsets)), len(subsets))
            assert pass_at_k(samples, right, k) == pytest.approx(float(expected), abs=1e-12)
            together = Fraction(sum(map(min, subsets)), len(subsets))
            assert pass_hat_k(samples, right, k) == pytest.approx(float(together), abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_a_majority_is_the_mean_over_all_subsets_with_ties_shared(seed: int) -> None:
    rng = random.Random(seed)
    right = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0}
    answers = [rng.choice([None, *right]) for _ in range(rng.randint(1, 8))]
    votes: list[Vote] = [(one, right.get(one, 0.0) if one else 0.0) for one in answers]
    for k in range(1, len(votes) + 1):
        expected = Fraction(0)
        subsets = list(itertools.combinations(votes, k))
        for subset in subsets:
            counts = Counter(one for one, _ in subset if one is not None)
            most = max(counts.values(), default=0)
            best = [one for one, count in counts.items() if count == most]
            expected += Fraction(sum(int(right[one]) for one in best), max(len(best), 1))
        assert majority_at_k(votes, k) == pytest.approx(float(expected / len(subsets)), abs=1e-12)


def test_a_majority_of_many_samples_is_quick_and_sure() -> None:
    votes: list[Vote] = [("7", 1.0)] * 40 + [(f"-{number}", 0.0) for number in range(24)]
    assert majority_at_k(votes, 64) == 1.0 and majority_at_k(votes, 1) == pytest.approx(40 / 64)
    assert of_subsets([(None, 1.0)] * 3, 3).keys() == {f"pass{sign}{k}" for sign in "@^" for k in (1, 2, 3)}
    with pytest.raises(ValueError, match="maj@2 of 1 samples"):
        majority_at_k(votes[:1], 2)


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
