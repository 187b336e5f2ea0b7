"""Sums up the means of tasks one by one: mean, spread, and what decides the kind of interval.

Guarantees: memory does not grow with the number of tasks; the sums are Welford's, which lose nothing where the mean is
large beside the spread (Welford 1962, Technometrics 4(3)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.evaluate.intervals import ROUNDING, proportion_interval, share_interval, student_half


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95% interval; the bounds are NaN where the data give none.

    Attributes:
        mean: Mean over the tasks.
        low: Lower bound of the interval.
        high: Upper bound.
        if_wrong: The mean if all invalid episodes were wrong; NaN where that says nothing.
        if_right: The mean if all invalid episodes were right.
    """

    mean: float
    low: float
    high: float
    if_wrong: float = math.nan
    if_right: float = math.nan


class Moments:
    """Running sums of one metric.

    Args:
        share: Whether values within 0 and 1 are taken for shares; those of a count or a duration are not, and have no
            bound below 0.

    Attributes:
        tasks: Number of tasks.
        episodes: Number of values.
        mean: Mean over the tasks; NaN without one.
    """

    __slots__ = ("_binary", "_flat", "_largest", "_means", "_share", "_squares", "_whole", "episodes", "mean", "tasks")

    def __init__(self, *, share: bool = True) -> None:
        self._share = share
        self.tasks = self.episodes = 0
        self.mean = math.nan
        self._squares = 0.0
        self._means = self._flat = (math.inf, -math.inf)  # smallest and largest
        self._largest = 0.0
        self._binary = True  # whether all values are 0 or 1
        self._whole = True  # whether all tasks' means are

    def add(self, values: Sequence[float]) -> None:
        """Adds a task with the values of its samples, at least one."""
        if len(values) == 1:
            return self.add_single(values[0])
        value = fmean(values)
        self.episodes += len(values)
        self._binary &= all(one in (0.0, 1.0) for one in values)
        self._flat = min(self._flat[0], *values), max(self._flat[1], *values)
        self._add(value)

    def add_single(self, value: float) -> None:
        """Adds a task with one sample; the same as :meth:`add`, and quicker."""
        self.episodes += 1
        if value != 0.0 and value != 1.0:
            self._binary = False
        low, high = self._flat
        if not low <= value <= high:
            self._flat = min(low, value), max(high, value)
        self._add(value)

    def add_zeros(self, tasks: int, episodes: int) -> None:
        """Adds tasks whose values are all 0."""
        if tasks:
            self._flat = min(self._flat[0], 0.0), max(self._flat[1], 0.0)
            for _ in range(tasks):
                self._add(0.0)
            self.episodes += episodes

    def _add(self, value: float) -> None:
        self.tasks += 1
        if value != 0.0 and value != 1.0:
            self._whole = False
        if self.tasks == 1:
            self.mean = value
        else:
            off = value - self.mean
            self.mean += off / self.tasks
            self._squares += off * (value - self.mean)
        low, high = self._means
        if not low <= value <= high:
            self._means = min(low, value), max(high, value)
            self._largest = max(self._largest, abs(value))

    def estimate(self, if_wrong: float = math.nan, if_right: float = math.nan) -> Estimate:
        """Computes the mean over tasks, with its interval: for shares one within 0 and 1, else Student's.

        Where each task is right or wrong, with all its samples, the interval is exact (Blaker's). Other shares count as
        many independent tasks as have their spread, see :func:`~agentrl.evaluate.intervals.share_interval`. Where the
        tasks do not differ, they count a task's samples as one, which is the cautious choice; other values have no
        interval then.
        """
        within = self._share and self._flat[0] >= 0 and self._flat[1] <= 1
        equal = self.tasks < 2 or self._means[1] - self._means[0] <= ROUNDING * self._largest
        if within and (self._whole or equal):
            low, high = proportion_interval(round(self.mean * self.tasks), self.tasks)
        elif equal:
            low, high = math.nan, math.nan
        elif within:
            variance = self._squares / (self.tasks - 1)
            low, high = share_interval(self.mean, variance, self.tasks, self.episodes if self._binary else math.inf)
        else:
            half = student_half(self._squares / (self.tasks - 1), self.tasks)
            low, high = self.mean - half, self.mean + half
            if not self._share and self._flat[0] >= 0:
                low = max(low, 0.0)
        return Estimate(self.mean, low, high, if_wrong, if_right)
