"""Computes the change of a metric between two evaluations of the same tasks, with a paired 95% interval.

Guarantees: only tasks that both evaluations judged are compared, each with equal weight; what makes one task harder
than another cancels in the differences, so that the interval is of the change and not of the tasks; where the data do
not determine the spread, the bounds are NaN.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from agentrl.evaluate.intervals import CONFIDENCE, differ_by_rounding, mean_interval, telling_values


@dataclass(frozen=True)
class Change:
    """Mean change over the tasks that both evaluations judged, its 95% interval, and the number of these tasks."""

    mean: float
    low: float
    high: float
    tasks: int


def changes(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> dict[str, Change]:
    """Compares all metrics that both evaluations have.

    Args:
        before: Mean over the valid samples of each task, by metric and task.
        after: The same of the later evaluation.
    """
    found = {}
    for name in before.keys() & after.keys():
        tasks = sorted(before[name].keys() & after[name].keys())
        if tasks:
            found[name] = change([before[name][task] for task in tasks], [after[name][task] for task in tasks])
    return found


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compares two evaluations of the same tasks, in the same order.

    A metric that is 0 or 1 in every task gets Bonett and Price's interval (2012, J. Educ. Behav. Stat. 37(4)): that of
    the differences with one more task of +1 and one of -1, so that it has a width where no task changed. Others get
    Student's interval of the differences, with one degree of freedom for each task that changed, and one more: where
    few did, their spread is known no better. With one for each task it covers 81 of 100 where five of 100 tasks gain.
    """
    differences = [later - earlier for earlier, later in zip(before, after, strict=True)]
    mean = fmean(differences)
    if {*before, *after} <= {0.0, 1.0}:
        low, high = _of_pairs(differences)
    elif differ_by_rounding(differences, (*before, *after)):
        low, high = math.nan, math.nan
    else:
        low, high = mean_interval([[value] for value in differences], telling_values(differences))
    if all(0 <= value <= 1 for value in (*before, *after)) and not math.isnan(low):
        low, high = max(low, -1.0), min(high, 1.0)
    return Change(mean, low, high, len(differences))


def _of_pairs(differences: Sequence[float]) -> tuple[float, float]:
    count = len(differences) + 2
    gained = (sum(value > 0 for value in differences) + 1) / count
    lost = (sum(value < 0 for value in differences) + 1) / count
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt((gained + lost - (gained - lost) ** 2) / count)
    return gained - lost - half, gained - lost + half
