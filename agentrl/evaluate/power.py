"""Estimates before an evaluation what its number of tasks can tell.

Guarantees: the figures are for an accuracy of single samples at its widest, one half; more samples a task and other
accuracies only make the intervals narrower. Source: Miller 2024, arXiv:2411.00640, section 5.
"""

import math
from statistics import NormalDist

from agentrl.evaluate.fixed_width import tasks_needed
from agentrl.evaluate.intervals import CONFIDENCE

POWER = 0.8
FLIPS = 0.2  # share of the tasks that two runs judge differently, where nothing is known of it


def half_width(tasks: int) -> float:
    """Computes the largest half width that the accuracy's 95% interval has after so many tasks."""
    return min(0.5, _z((1 + CONFIDENCE) / 2) * 0.5 / math.sqrt(tasks))


def detectable(tasks: int, flips: float = FLIPS, power: float = POWER) -> float | None:
    """Computes the difference of two runs that a paired comparison finds.

    Args:
        tasks: Number of tasks that both runs judge.
        flips: Share of the tasks that are right in one run and wrong in the other.
        power: Chance to find the difference at the 5% level.

    Returns:
        The smallest difference of the accuracies; ``None`` if it would have to exceed ``flips``, which it cannot: the
        runs differ in no other task.
    """
    factor = (_z((1 + CONFIDENCE) / 2) + _z(power)) ** 2 / tasks
    # The variance of a task's difference d is flips - d^2, so d^2 = factor * (flips - d^2).
    difference = math.sqrt(factor * flips / (1 + factor))
    return difference if difference <= flips else None


def tasks_for(difference: float, flips: float = FLIPS, power: float = POWER) -> int:
    """Computes the number of tasks with which :func:`detectable` is ``difference``."""
    both = (_z((1 + CONFIDENCE) / 2) + _z(power)) ** 2
    return math.ceil(both * (flips - difference**2) / difference**2)


def power_line(tasks: int) -> str:
    """Returns the figures as a sentence."""
    within = f"{tasks} task{'s' * (tasks != 1)}: accuracy within {100 * half_width(tasks):.1f} points"
    assumed = f"if {FLIPS:.0%} of the tasks flip (power {POWER:.0%})"
    difference = detectable(tasks)
    if difference is None:
        return f"{within}; too few to tell two runs apart, which takes at least {tasks_for(FLIPS)} {assumed}"
    return f"{within}; two runs on them are told apart from {100 * difference:.1f} points on, {assumed}"


def until_line(half_width: float, tasks: int) -> str:
    """Says how many tasks ``eval.until_ci`` needs, and whether there are as many.

    Args:
        half_width: Half width of the interval at which the evaluation ends.
        tasks: Number of tasks that there are.
    """
    most, high = (tasks_needed(half_width, tasks, mean) for mean in (0.5, 0.9))
    needs = f"±{100 * half_width:g} points need about {most} tasks at an accuracy of 50%, {high} at 90%"
    if tasks >= most:
        return needs
    return f"{needs}; there are {tasks}: it may not come to that"


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share)
