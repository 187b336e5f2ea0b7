"""Summarizes finished episodes as metrics with 95% intervals.

Guarantees: a failed episode is counted as invalid and excluded from every mean; all tasks have equal weight; an
interval that the data cannot give is left out of :meth:`EvalSummary.as_metrics`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.core.episode import Episode
from agentrl.evaluate.intervals import mean_interval, proportion_interval

SUCCESS = "accuracy"  # the metric behind pass@k


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks and its 95% interval; the bounds are NaN where the data give none."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalSummary:
    """Result of an evaluation.

    Attributes:
        n: Number of episodes that did not fail.
        failed: Number of episodes that failed; wrong answers are not among them.
        tasks: Number of tasks with at least one episode that did not fail.
        samples: Largest number of episodes that a task has.
        estimates: Estimate of the reward, of ``reward/<role>`` for roles with a reward of their own, of each metric of
            the episodes, and of ``pass@k`` if ``samples`` > 1.
    """

    n: int
    failed: int
    tasks: int
    samples: int
    estimates: dict[str, Estimate]

    def as_metrics(self) -> dict[str, float]:
        """Returns flat metrics: ``eval/<metric>`` with ``_low`` and ``_high``, ``eval/n``, ``eval/invalid``."""
        metrics = {"eval/n": float(self.n), "eval/invalid": float(self.failed)}
        for name, estimate in self.estimates.items():
            metrics[f"eval/{name}"] = estimate.mean
            if not math.isnan(estimate.low):
                metrics[f"eval/{name}_low"] = estimate.low
                metrics[f"eval/{name}_high"] = estimate.high
        return metrics


def summarize(episodes: Sequence[Episode]) -> EvalSummary:
    """Computes means and intervals over the episodes that did not fail.

    Args:
        episodes: All attempts; those with the same ``task_id`` are samples of one task.
    """
    judged = [episode for episode in episodes if not episode.failed]
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    attempts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        attempts[episode.task_id] += 1
    for episode in judged:
        if episode.reward is not None:
            values["reward"][episode.task_id].append(episode.reward)
        for role, value in episode.role_rewards.items():
            values[f"reward/{role}"][episode.task_id].append(value)
        for name, value in episode.metrics.items():
            values[name][episode.task_id].append(value)
    estimates = {name: estimate(list(per_task.values())) for name, per_task in sorted(values.items())}
    samples = max(attempts.values(), default=0)
    if samples > 1:
        complete = [found for found in values[SUCCESS].values() if len(found) == samples]
        if complete:
            estimates[f"pass@{samples}"] = estimate([[float(max(found) >= 1)] for found in complete])
    return EvalSummary(
        n=len(judged),
        failed=len(episodes) - len(judged),
        tasks=len({episode.task_id for episode in judged}),
        samples=samples,
        estimates=estimates,
    )


def estimate(values_per_task: Sequence[Sequence[float]]) -> Estimate:
    """Computes the mean over tasks, with Wilson's interval for a proportion and Student's otherwise.

    Args:
        values_per_task: One non-empty list of values per task.
    """
    means = [fmean(values) for values in values_per_task]
    mean = fmean(means)
    flat = [value for values in values_per_task for value in values]
    within = all(0 <= value <= 1 for value in flat)
    single = all(len(values) == 1 for values in values_per_task)
    if within and ((single and set(flat) <= {0.0, 1.0}) or len(set(means)) == 1):
        # Without spread between tasks Student's interval has no width. Wilson's interval over tasks, which counts a
        # task's samples as one, is the cautious choice.
        low, high = proportion_interval(round(mean * len(means)), len(means))
    else:
        low, high = mean_interval(values_per_task)
        if within:
            low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high)
