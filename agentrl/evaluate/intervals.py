"""Computes 95% confidence intervals.

Guarantees: samples of one task are never counted as independent, which would make an interval too narrow; where the
data do not determine the spread, the bounds are NaN, not the mean. scipy is imported on first use.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean

CONFIDENCE = 0.95
ROUNDING = 1e-12  # relative error of sums and means
_GRID = 512  # proportions among which a bound is looked for
_TASKS_ADDED = 2  # whose samples all agree, to the tasks that tell the spread of shares
_DEGREES = 4  # of freedom, for each of these tasks


def differ_by_rounding(values: Sequence[float], terms: Sequence[float]) -> bool:
    """Returns whether values differ by no more than the rounding of the terms that they were computed from."""
    return max(values) - min(values) <= ROUNDING * max(map(abs, terms))


@lru_cache(maxsize=4096)
def proportion_interval(successes: int, n: int) -> tuple[float, float]:
    """Computes Blaker's interval of a proportion, which holds in at least 95 of 100 whatever the proportion is.

    It is exact, as Clopper and Pearson's is, and lies within that one: with 200 trials it holds in 95.6 of 100 on
    average instead of 96.0. Wilson's holds in 95 on average, and in 89.5 where 6% of 10 trials succeed.
    Source: Blaker 2000 (Canadian Journal of Statistics 28(4), 783-798).

    Args:
        successes: Number of successes among the ``n`` trials.
        n: Number of independent trials.

    Returns:
        Lower and upper bound, within 0 and 1; NaN for ``n == 0``.
    """
    if n == 0:
        return math.nan, math.nan
    return _blakers_bound(successes, n), 1 - _blakers_bound(n - successes, n)


def _blakers_bound(successes: int, n: int) -> float:
    """Computes the lower bound: the smallest proportion that is not refused.

    A proportion is refused if the chance of so many successes or more, and of equally few as are no more likely, is
    below 5%. It is accepted from where the upper tail alone has 5% on, and refused up to where it has half of that;
    between these, the bound is looked for on a grid, and is that of its points that is too small by less than a step.
    """
    if successes == 0:
        return 0.0
    import numpy as np
    from scipy.special import bdtr, bdtrc, betaincinv
    from scipy.stats import binom

    alpha = 1 - CONFIDENCE
    first, last = (float(betaincinv(successes, n - successes + 1, level)) for level in (alpha / 2, alpha))
    means = np.linspace(first, last, _GRID)
    upper = bdtrc(successes - 1, n, means)
    few = binom.ppf(upper, n, means)  # the least number whose lower tail is as likely
    few = np.where(bdtr(few, n, means) > upper * (1 + ROUNDING), few - 1, few)
    lower = np.where(few < 0, 0.0, bdtr(np.maximum(few, 0), n, means))
    accepted = upper + lower > alpha
    accepted[-1] = True
    return float(means[max(int(np.argmax(accepted)) - 1, 0)])


def mean_interval(values_per_task: Sequence[Sequence[float]], telling: float = math.inf) -> tuple[float, float]:
    """Computes the Student-t interval of the mean over tasks, each task's samples averaged first.

    Samples of one task are correlated; only tasks are independent (Miller 2024, arXiv:2411.00640, section 2.2).
    All tasks have equal weight, however many samples each has.

    Args:
        values_per_task: One list of values per task; empty lists are left out.
        telling: Number of tasks that tell the spread, see :func:`student_half`.

    Returns:
        Lower and upper bound; NaN for fewer than two tasks, and for means that are equal up to rounding.
    """
    means = [fmean(values) for values in values_per_task if values]
    if len(means) < 2 or differ_by_rounding(means, means):
        return math.nan, math.nan
    mean = fmean(means)
    half = student_half(sum((value - mean) ** 2 for value in means) / (len(means) - 1), len(means), telling)
    return mean - half, mean + half


def student_half(variance: float, n: int, telling: float = math.inf) -> float:
    """Computes half the width of Student's interval of a mean.

    Args:
        variance: Variance of the values, with ``n - 1`` in its denominator.
        n: Number of values, at least 2.
        telling: Number of values that tell the spread, where most are equal; the degrees of freedom are one more.
    """
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, min(n - 1, telling + 1))) * math.sqrt(variance / n)


def telling_values(values: Iterable[float]) -> float:
    """Returns how many equal values have the sum and the sum of squares of these, by size (Kish 1965).

    Zeros do not count; of values that differ, large ones count for more. It is 0 where all are 0.
    """
    sizes = [abs(value) for value in values]
    squares = math.fsum(size * size for size in sizes)
    return math.fsum(sizes) ** 2 / squares if squares else 0.0


def share_interval(mean: float, variance: float, n: int, most: float = math.inf) -> tuple[float, float]:
    """Computes Wilson's interval of a mean of shares, with the number of independent trials that has their spread.

    Student's interval covers less than it says where the mean is near 0 or 1 (of 50 tasks of two samples with a mean
    of 0.95: in 88 of 100), because few tasks then differ at all. This one does not leave 0 and 1 either.

    The spread is known only as well as the tasks tell it that differ from most: with eight samples of 50 tasks, of
    which two are solved at times, it comes out far too small as often as not. So its ratio to the largest spread that
    this mean allows, that of tasks which are all right or all wrong, counts as if two more tasks had the largest, and
    Student's quantile has four degrees of freedom for each task that differs, and one more. Both were chosen by
    simulation, so that no case of the grid in docs/evaluation.md is covered in less than 94 of 100; taken as it comes,
    with ``n - 1`` degrees, the spread covers down to 87.
    Source: Franco, Little, Louis and Slud 2019 (J. Survey Statistics and Methodology 7(3)), "Wilson", with Student's
    quantile as in Korn and Graubard 1998; the number of tasks that differ is :func:`telling_values`.

    Args:
        mean: Mean of the values, above 0 and below 1.
        variance: Variance of the values, above 0, with ``n - 1`` in its denominator.
        n: Number of values, at least 2, each within 0 and 1.
        most: Number of trials that there are at most.

    Returns:
        Lower and upper bound.
    """
    from scipy.stats import t

    rarer = min(mean, 1 - mean)
    telling = (n * rarer) ** 2 / ((n - 1) * variance + n * rarer**2)
    spread = min(max(variance / (mean * (1 - mean)), n / most), 1.0)
    trials = n / spread ** (telling / (telling + _TASKS_ADDED))
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, min(n - 1, _DEGREES * telling + 1)))
    square = quantile**2 / trials
    middle = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * mean * (1 - mean) + square**2 / 4) / (1 + square)
    return middle - half, middle + half
