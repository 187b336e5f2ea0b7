"""95% confidence intervals.

Guarantees: an interval is never narrower for counting samples of one task as if they were independent; where the data
say nothing about the spread, the bounds are NaN, not the mean. scipy is imported on first use.
"""

import math
from collections.abc import Sequence
from statistics import fmean

CONFIDENCE = 0.95


def proportion_interval(successes: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927).

    Args:
        successes: Number of successes among ``n``.
        n: Independent trials.

    Returns:
        Lower and upper bound, within 0 and 1; NaN for ``n == 0``.
    """
    if n == 0:
        return math.nan, math.nan
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values_per_task: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Student-t interval of the mean over tasks, each task's samples averaged first.

    Samples of one task are correlated, so tasks are what is independent (Miller 2024, arXiv:2411.00640, section 2.2).
    Tasks count alike, however many samples each has.

    Args:
        values_per_task: One list of values per task; empty ones are left out.

    Returns:
        Lower and upper bound; NaN for fewer than two tasks.
    """
    means = [fmean(values) for values in values_per_task if values]
    if len(means) < 2:
        return math.nan, math.nan
    from scipy.stats import t

    mean = fmean(means)
    error = math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means))
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(means) - 1)) * error
    return mean - half, mean + half
