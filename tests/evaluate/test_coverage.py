"""Intervals of simulated evaluations hold the truth in 95 of 100, and agree with a bootstrap."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm, t

from agentrl.evaluate.compare import p_value
from agentrl.evaluate.intervals import proportion_interval
from agentrl.evaluate.moments import Moments
from agentrl.evaluate.paired import change
from agentrl.evaluate.power import detectable, half_width, power_line, tasks_for

DRAWS = 2000
CLOSE = 0.01


def covers(values: np.ndarray, mean: float) -> bool:
    moments = Moments()
    for of_task in values:
        moments.add(of_task.tolist())
    one = moments.estimate()
    return one.low <= mean <= one.high


def test_an_accuracy_of_several_samples_a_task_is_covered() -> None:
    """Tasks of very different difficulty, five samples each; counting samples as independent covers far less."""
    rng = np.random.default_rng(11)
    covered = naive = 0
    for _ in range(DRAWS):
        difficulty = rng.beta(0.6, 0.4, 150)
        values = (rng.random((150, 5)) < difficulty[:, None]).astype(float)
        covered += covers(values, 0.6)
        half = 1.96 * math.sqrt(values.mean() * (1 - values.mean()) / values.size)
        naive += abs(values.mean() - 0.6) <= half
    assert covered / DRAWS == pytest.approx(0.95, abs=CLOSE)
    assert naive / DRAWS < 0.8


@pytest.mark.parametrize(
    ("difficulty", "tasks", "samples"),
    [((9.5, 0.5), 50, 2), ((9.5, 0.5), 50, 4), ((0.5, 4.5), 50, 4), ((0.5, 4.5), 100, 2), ((2.0, 2.0), 50, 4)],
)
def test_an_accuracy_near_its_ends_is_covered_too(difficulty: tuple[float, float], tasks: int, samples: int) -> None:
    """Most tasks are always right, or always wrong; Student's interval covers down to 88 of 100 there.

    How much a few tasks tell of the spread is not known, so the interval is wide enough for what it may be.
    """
    rng = np.random.default_rng(21)
    mean = difficulty[0] / sum(difficulty)
    covered = student = 0
    for _ in range(DRAWS):
        p = rng.beta(*difficulty, tasks)
        values = (rng.random((tasks, samples)) < p[:, None]).astype(float)
        covered += covers(values, mean)
        means = values.mean(axis=1)
        student += abs(means.mean() - mean) <= t.ppf(0.975, tasks - 1) * means.std(ddof=1) / math.sqrt(tasks)
    assert 0.95 - CLOSE <= covered / DRAWS <= 0.95 + 4 * CLOSE, "it may be a little cautious"
    if difficulty == (9.5, 0.5):
        assert student / DRAWS < 0.95 - CLOSE


def coverage(tasks: int, samples: int, mean: float, correlation: float, draws: int, *seed: int) -> tuple[float, float]:
    """Shares of evaluations whose interval holds the mean: ours, and the same without care for the spread's own.

    A task's chance is drawn from the beta distribution with this mean and this correlation of two samples of a task.
    """
    rng = np.random.default_rng([tasks, samples, int(100 * mean), int(100 * correlation), *seed])
    weight = 1 / correlation - 1
    right = rng.binomial(samples, rng.beta(mean * weight, (1 - mean) * weight, (draws, tasks)))
    sums = np.stack([right.sum(axis=1), (right**2).sum(axis=1)], axis=1)  # all that the intervals depend on
    _, first, counts = np.unique(sums, axis=0, return_index=True, return_counts=True)
    found = plain = 0
    for row, count in zip(right[first], counts, strict=True):
        found += count * covers(np.arange(samples) < row[:, None], mean)
        share, variance = row.mean() / samples, (row / samples).var(ddof=1)
        limit = min(share * (1 - share) * tasks / variance, tasks * samples) if variance else tasks
        square = (t.ppf(0.975, tasks - 1) if variance else norm.ppf(0.975)) ** 2 / limit
        half = math.sqrt(square * share * (1 - share) + square**2 / 4)
        plain += count * (abs(share + square / 2 - mean * (1 + square)) <= half)
    return found / draws, plain / draws


FEW = list(itertools.product((20, 50), (4, 8), (0.02, 0.05, 0.1), (0.3, 0.6)))
ALL = list(
    itertools.product(
        (10, 20, 50, 100, 200, 500), (2, 4, 8, 32), (0.02, 0.05, 0.1, 0.2, 0.5), (0.01, 0.1, 0.3, 0.6, 0.9)
    )
)


def test_an_accuracy_is_covered_where_few_tasks_are_solved_at_times() -> None:
    covered = [coverage(*case, draws=DRAWS) for case in FEW]
    assert min(ours for ours, _ in covered) >= 0.95 - CLOSE
    assert min(plain for _, plain in covered) < 0.88, "the spread of the tasks as it comes, which is too small"


@pytest.mark.long
def test_an_accuracy_is_covered_in_all_cases() -> None:
    """From 10 to 500 tasks of 2 to 32 samples, alike or not; the other end is the mirror image.

    Of 600 cases of 2,000 draws, at 0.005 of standard error, some are low by chance: these are drawn again, more often.
    """
    covered = {case: coverage(*case, draws=DRAWS)[0] for case in ALL}
    for tasks in dict.fromkeys(case[0] for case in ALL):
        own = [value for case, value in covered.items() if case[0] == tasks]
        print(f"{tasks} tasks: {min(own):.3f} to {max(own):.3f}, mean {np.mean(own):.3f}")
    again = {case: coverage(*case, 5 * DRAWS, 1)[0] for case, value in covered.items() if value < 0.95 - CLOSE}
    print(f"drawn again: {again}")
    assert all(value >= 0.95 - CLOSE for value in again.values())


@pytest.mark.parametrize("few", [0.02, 0.1])
def test_partial_accuracies_are_covered(few: float) -> None:
    """Most tasks have 0, some a part of their points; Student's interval covers 87 of 100 at 100 tasks."""
    rng = np.random.default_rng(31)
    tasks, weight = 100, 1 / 0.6 - 1
    drawn = np.round(rng.beta(few * weight, (1 - few) * weight, (DRAWS, tasks)), 1)
    mean = np.round(rng.beta(few * weight, (1 - few) * weight, 2_000_000), 1).mean()
    assert np.mean([covers(values[:, None], mean) for values in drawn]) >= 0.95 - CLOSE


def test_an_accuracy_of_single_samples_is_covered_on_average_over_its_values() -> None:
    """Exactly: summed over all counts. It holds at each accuracy, and on average over them it is hardly wider."""
    n = 200
    bounds = np.array([proportion_interval(right, n) for right in range(n + 1)])
    means = np.linspace(0.05, 0.95, 181)
    covered = [
        binom.pmf(np.arange(n + 1), n, mean)[(bounds[:, 0] <= mean) & (mean <= bounds[:, 1])].sum() for mean in means
    ]
    assert np.min(covered) >= 0.95 and np.mean(covered) == pytest.approx(0.95, abs=CLOSE)


def test_the_interval_is_that_of_a_bootstrap_over_tasks() -> None:
    rng = np.random.default_rng(2)
    values = rng.gamma(2.0, 1.0, (300, 3)) + rng.normal(0, 1, (300, 1))
    moments = Moments(share=False)
    for of_task in values:
        moments.add(of_task.tolist())
    one = moments.estimate()
    means = values.mean(axis=1)
    resampled = means[rng.integers(0, 300, (20_000, 300))].mean(axis=1)
    assert one.mean == pytest.approx(means.mean(), rel=1e-12)
    assert (one.low, one.high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])), abs=0.02)


def test_a_paired_difference_is_covered_and_found_as_often_as_foretold() -> None:
    """A fifth of the tasks flip, with the difference that the power estimate names."""
    tasks = 300
    difference = detectable(tasks)
    assert difference is not None
    rng = np.random.default_rng(7)
    covered = found = 0
    for _ in range(DRAWS):
        draw = rng.random(tasks)
        gained, lost = draw < (0.2 + difference) / 2, draw > 1 - (0.2 - difference) / 2
        before = rng.random(tasks) < 0.5
        before = np.where(gained, False, np.where(lost, True, before))
        after = np.where(gained, True, np.where(lost, False, before))
        one = change(before.astype(float).tolist(), after.astype(float).tolist())
        covered += one.low <= difference <= one.high
        found += p_value(before.astype(float).tolist(), after.astype(float).tolist()) < 0.05
    assert covered / DRAWS == pytest.approx(0.95, abs=CLOSE)
    assert found / DRAWS == pytest.approx(0.8, abs=0.04)  # an exact test is a little cautious


def test_without_a_difference_a_small_p_value_is_seldom() -> None:
    rng = np.random.default_rng(8)
    small = {"exact": 0, "student": 0}
    for _ in range(DRAWS):
        hard = rng.beta(1, 1, 80)
        sides = [(rng.random((80, 4)) < hard[:, None]).mean(axis=1).tolist() for _ in range(2)]
        small["student"] += p_value(*sides) < 0.05
        small["exact"] += p_value(*[[float(value >= 0.5) for value in side] for side in sides]) < 0.05
    assert small["student"] / DRAWS == pytest.approx(0.05, abs=CLOSE)
    assert small["exact"] / DRAWS <= 0.05 + CLOSE


def test_the_power_figures_are_their_formulas() -> None:
    assert half_width(200) == pytest.approx(norm.ppf(0.975) * math.sqrt(0.25 / 200))
    difference = detectable(500, flips=0.1)
    assert difference is not None
    needed = (norm.ppf(0.975) + norm.ppf(0.8)) ** 2 * (0.1 - difference**2) / difference**2
    assert needed == pytest.approx(500)
    assert tasks_for(difference, flips=0.1) in (500, 501)


def test_a_difference_cannot_be_larger_than_the_share_of_tasks_that_flip() -> None:
    fewest = tasks_for(0.2)
    assert detectable(fewest - 1) is None
    assert detectable(fewest) == pytest.approx(0.2, abs=0.005)
    assert power_line(1).startswith("1 task: accuracy within 50.0 points; too few to tell two runs apart")
    assert f"at least {fewest} if 20% of the tasks flip" in power_line(8)
