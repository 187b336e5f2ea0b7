"""Computes 95% confidence intervals.

Guarantees: samples of one task are never counted as independent, which would make an interval too narrow; where the
data do not determine the spread, the bounds are NaN, not the mean. scipy is imported on first use.
"""

import math
from collections.abc import Sequence
from statistics import fmean

CONFIDENCE = 0.95
ROUNDING = 1e-12  # relative error of sums and means


def differ_by_rounding(values: Sequence[float], terms: Sequence[float]) -> bool:
    """Returns whether values differ by no more than the rounding of the terms that they were computed from."""
    return max(values) - min(values) <= ROUNDING * max(map(abs, terms))


def proportion_interval(successes: int, n: int) -> tuple[float, float]:
    """Computes the Wilson score interval of a proportion (Wilson 1927).

    Args:
        successes: Number of successes among the ``n`` trials.
        n: Number of independent trials.

    Returns:
        Lower and upper bound, within 0 and 1; NaN for ``n == 0``.
    """
    if n == 0:
        return math.nan, math.nan
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values_per_task: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Computes the Student-t interval of the mean over tasks, each task's samples averaged first.

    Samples of one task are correlated; only tasks are independent (Miller 2024, arXiv:2411.00640, section 2.2).
    All tasks have equal weight, however many samples each has.

    Args:
        values_per_task: One list of values per task; empty lists are left out.

    Returns:
        Lower and upper bound; NaN for fewer than two tasks, and for means that are equal up to rounding.
    """
    means = [fmean(values) for values in values_per_task if values]
    if len(means) < 2 or differ_by_rounding(means, means):
        return math.nan, math.nan
    mean = fmean(means)
    half = student_half(sum((value - mean) ** 2 for value in means) / (len(means) - 1), len(means))
    return mean - half, mean + half


def student_half(variance: float, n: int) -> float:
    """Computes half the width of Student's interval of a mean.

    Args:
        variance: Variance of the values, with ``n - 1`` in its denominator.
        n: Number of values, at least 2.
    """
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * math.sqrt(variance / n)


def share_interval(mean: float, variance: float, n: int, most: float = math.inf) -> tuple[float, float]:
    """Computes Wilson's interval of a mean of shares, with the number of independent trials that has their spread.

    Student's interval covers less than it says where the mean is near 0 or 1 (of 50 tasks of two samples with a mean
    of 0.95: in 88 of 100), because few tasks then differ at all. This one does not leave 0 and 1 either.
    Source: Franco, Little, Louis and Slud 2019 (J. Survey Statistics and Methodology 7(3)), "Wilson", with Student's
    quantile as in Korn and Graubard 1998.

    Args:
        mean: Mean of the values, above 0 and below 1.
        variance: Variance of the values, above 0, with ``n - 1`` in its denominator.
        n: Number of values, at least 2, each within 0 and 1.
        most: Number of trials that there are at most.

    Returns:
        Lower and upper bound.
    """
    from scipy.stats import t

    trials = min(mean * (1 - mean) * n / variance, most)
    square = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) ** 2 / trials
    middle = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    return middle - half, middle + half
