"""The change between two evaluations: against SciPy, by its formula, and by how often it covers the truth."""

import math
import random

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from agentrl.evaluate.intervals import mean_interval
from agentrl.evaluate.paired import change, changes


def test_means_get_the_paired_t_interval() -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(0, 1, 30)
    before, after = hard, hard * 0.8 + 0.3 + rng.normal(0, 0.05, 30)
    found = change(before.tolist(), after.tolist())
    expected = ttest_rel(after, before).confidence_interval(0.95)
    moved = np.abs(after - before)
    wider = t.ppf(0.975, min(29, moved.sum() ** 2 / (moved**2).sum() + 1)) / t.ppf(0.975, 29)
    assert found.mean == pytest.approx((after - before).mean())
    assert found.high - found.mean == pytest.approx((expected.high - found.mean) * wider)
    assert found.mean - found.low == pytest.approx((found.mean - expected.low) * wider) and 1 <= wider < 1.01
    assert found.tasks == 30
    alone = mean_interval([[value] for value in after])
    assert found.high - found.low < (alone[1] - alone[0]) / 3  # the tasks' own spread is not in it


def test_right_and_wrong_get_bonett_and_prices_interval() -> None:
    """Both right 20 times, lost 3 times, gained 12 times, both wrong 15 times; written out by hand."""
    before = [1.0] * 23 + [0.0] * 27
    after = [1.0] * 20 + [0.0] * 3 + [1.0] * 12 + [0.0] * 15
    gained, lost = 13 / 52, 4 / 52
    half = 1.959963984540054 * math.sqrt((gained + lost - (gained - lost) ** 2) / 52)
    found = change(before, after)
    assert found.mean == pytest.approx(9 / 50)
    assert (found.low, found.high) == pytest.approx((gained - lost - half, gained - lost + half))


def test_nothing_changed_is_no_certainty() -> None:
    found = change([1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0])
    assert found.mean == 0.0 and -1 <= found.low < -0.2 and 0.2 < found.high <= 1
    assert math.isnan(change([0.5, 0.25], [0.75, 0.5]).low)  # equal differences do not tell their spread
    assert math.isnan(change([0.5], [0.75]).low)


def test_rounding_is_no_spread() -> None:
    assert 0.4 - 0.2 != 0.3 - 0.1 and 0.1 + 0.2 != 0.3
    assert math.isnan(change([0.1, 0.2], [0.3, 0.4]).low)
    assert math.isnan(change([0.3, 0.3], [0.3, 0.1 + 0.2]).low)
    assert math.isnan(change([-1.0, -1.0, 2.5], [-1.0, -1.0, 2.5]).low)


@pytest.mark.parametrize("samples", [1, 4])
def test_it_covers_the_true_change_about_as_often_as_it_says(samples: int) -> None:
    rng = random.Random(0)
    covered, trials, tasks = 0, 400, 60
    for _ in range(trials):
        before, after = [], []
        for _ in range(tasks):
            p = rng.random() * 0.8
            before.append(sum(rng.random() < p for _ in range(samples)) / samples)
            after.append(sum(rng.random() < p + 0.2 for _ in range(samples)) / samples)
        found = change(before, after)
        covered += found.low <= 0.2 <= found.high
    assert 0.92 <= covered / trials <= 0.985


@pytest.mark.parametrize(("tasks", "gaining"), [(100, 0.05), (200, 0.05), (20, 0.3)])
def test_a_gain_of_few_tasks_is_covered(tasks: int, gaining: float) -> None:
    """Half of the tasks are always right, the others never; some of these are solved in 30% of four samples then.

    Student's interval with a degree of freedom for each task covers 81 to 87 of 100.
    """
    rng = np.random.default_rng(12)
    covered = student = 0
    for _ in range(DRAWS := 1000):
        always = rng.random(tasks) < 0.5
        after = np.where(always, 1.0, rng.binomial(4, 0.3, tasks) / 4 * (rng.random(tasks) < gaining))
        found, truth = change(always.astype(float).tolist(), after.tolist()), 0.5 * gaining * 0.3
        covered += found.low <= truth <= found.high or math.isnan(found.low)  # no task changed: no interval is given
        moved = after - always
        half = t.ppf(0.975, tasks - 1) * moved.std(ddof=1) / math.sqrt(tasks)
        student += abs(moved.mean() - truth) <= half
    assert covered / DRAWS >= 0.935 and student / DRAWS < 0.9, (covered, student)


def test_only_tasks_that_both_judged_are_compared() -> None:
    before = {"accuracy": {"a": 0.0, "b": 1.0, "c": 1.0}, "old": {"a": 1.0}, "apart": {"a": 1.0}}
    after = {"accuracy": {"a": 1.0, "b": 1.0, "d": 0.0}, "new": {"a": 1.0}, "apart": {"b": 1.0}}
    found = changes(before, after)
    assert list(found) == ["accuracy"]
    assert (found["accuracy"].mean, found["accuracy"].tasks) == (0.5, 2)
