"""Computes the interval with which an evaluation ends as soon as that is narrow enough.

Guarantees: the interval at the end holds the mean in at least 95 of 100 evaluations, whatever the mean, although the
rule looks again and again and ends because of what it saw. For tasks that are right or wrong this is computed, not
assumed: the chances of all ways through the evaluation are summed up, and the quantile is raised until the worst mean
is covered (:func:`quantile_of`). Tasks with partial accuracies spread less than that, so they are covered as well.

An evaluation that ends when the usual interval happens to be narrow misses the mean more often than it says: in 8 of
100 at a half width of 0.15. A confidence sequence would hold at any end, but asks for 2.4 times the tasks.
Source: Frey 2010 (The American Statistician 64(3), 242-249), with the interval of Agresti and Coull 1998.
"""

import math
from functools import lru_cache
from typing import Any

from agentrl.evaluate.intervals import CONFIDENCE

ADDED = 2.5  # right and as many wrong tasks that are added, so that the first few tasks do not look certain
LOOKS = 50  # the rule looks after each fiftieth of the tasks so far
_EXACT = 300  # tasks up to which all ways are summed up; with more, the quantile is closer to that of a fixed number
_MEANS = 160
_STEP = 0.01


def is_looked_at(n: int) -> bool:
    """Returns whether the rule looks at the interval after ``n`` tasks."""
    return n % max(1, n // LOOKS) == 0


def stopping_interval(total: Any, n: Any, quantile: float) -> tuple[Any, Any]:
    """Computes the interval after ``n`` tasks; arrays are broadcast.

    Args:
        total: Sum of the tasks' accuracies, each within 0 and 1.
        n: Number of tasks.
        quantile: Result of :func:`quantile_of`.

    Returns:
        Lower and upper bound, within 0 and 1.
    """
    import numpy as np

    count = np.asarray(n, dtype=float) + 2 * ADDED
    middle = (np.asarray(total, dtype=float) + ADDED) / count
    half = quantile * np.sqrt(middle * (1 - middle) / count)
    low, high = np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
    return (low.item(), high.item()) if low.ndim == 0 else (low, high)


def is_narrow(total: Any, n: Any, quantile: float, half_width: float) -> Any:
    """Returns whether the interval has at most the wanted half width; arrays are broadcast."""
    low, high = stopping_interval(total, n, quantile)
    return (high - low) / 2 <= half_width


@lru_cache(maxsize=64)
def quantile_of(half_width: float, tasks: int) -> float:
    """Computes the quantile with which the interval at the end holds in 95 of 100.

    Args:
        half_width: Half width at which the evaluation ends.
        tasks: Number of tasks with which it ends in any case.
    """
    from statistics import NormalDist

    plain = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if min(tasks, tasks_at(half_width, 0.5, plain)) > _EXACT:  # wider ones need more
        half_width, tasks = plain / 2 / math.sqrt(_EXACT), 2 * _EXACT
    quantile = plain
    while worst_coverage(half_width, tasks, quantile) < CONFIDENCE:
        quantile += _STEP
    return quantile


def worst_coverage(half_width: float, tasks: int, quantile: float) -> float:
    """Computes the chance that the interval at the end holds the mean, for the mean at which it is smallest.

    Args:
        half_width: Half width at which the evaluation ends.
        tasks: Number of tasks with which it ends in any case.
        quantile: Quantile of the interval.
    """
    import numpy as np

    means = np.concatenate([np.geomspace(1e-4, 0.05, _MEANS // 2), np.linspace(0.051, 0.5, _MEANS // 2)])[:, None]
    running, missed = np.ones((len(means), 1)), np.zeros(len(means))  # chance to be there with so many right ones
    for n in range(1, tasks + 1):
        more = np.zeros((len(means), n + 1))
        more[:, :-1] = running * (1 - means)
        more[:, 1:] += running * means
        running = more
        if n < tasks and not is_looked_at(n):
            continue
        right = np.arange(n + 1)
        ends = is_narrow(right, n, quantile, half_width) | (n == tasks)
        low, high = stopping_interval(right, n, quantile)
        missed += (running * (ends & ((means < low) | (means > high)))).sum(axis=1)
        running = running * ~ends
        if ends.all():
            break
    return float(1 - missed.max())


def tasks_needed(half_width: float, tasks: int, mean: float = 0.5) -> int:
    """Returns about how many tasks the rule needs, of so many that there are, where so many are right."""
    return tasks_at(half_width, mean, quantile_of(half_width, tasks))


def tasks_at(half_width: float, mean: float, quantile: float) -> int:
    """Returns with how many tasks the interval has a half width."""
    n = 1
    while not is_narrow(mean * n, n, quantile, half_width):
        n += max(1, n // LOOKS)
    return n
