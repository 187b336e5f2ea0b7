"""Summarizes finished episodes as metrics with 95% intervals.

Guarantees: a failed episode is counted as invalid and excluded from every mean; one that was cut before it could be
judged, also by the end of the context, is wrong and not invalid; all tasks have equal weight, a task with failed
episodes with its valid ones; an interval that the data cannot give is left out of :meth:`EvalSummary.as_metrics`; a
metric that not all of the judged episodes have says of how many it is.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.core.ending import SUCCESS, counted_metrics, episode_cut
from agentrl.core.episode import Episode
from agentrl.evaluate.intervals import differ_by_rounding, mean_interval, proportion_interval
from agentrl.evaluate.pass_at_k import passes


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
        abandoned: Number of episodes whose teardown was given up at its limit, failed or not.
        tasks: Number of tasks with at least one episode that did not fail.
        samples: Largest number of episodes that a task has.
        estimates: Estimate of the reward, of ``reward/<role>`` for roles with a reward of their own, of each metric of
            the episodes, of the share of episodes that were cut (``truncated``), and of ``pass@1`` to ``pass@samples``
            if ``samples`` > 1.
        per_task: Means over each task's valid samples, by name and task; an estimate is their mean.
        episodes: Number of episodes that each metric of episodes is of.
    """

    n: int
    failed: int
    abandoned: int
    tasks: int
    samples: int
    estimates: dict[str, Estimate]
    per_task: dict[str, dict[str, float]]
    episodes: dict[str, int]

    def as_metrics(self) -> dict[str, float]:
        """Returns flat metrics: ``eval/<metric>`` with ``_low`` and ``_high``, and the counts of episodes.

        The counts are ``eval/n``, ``eval/invalid`` and ``eval/abandoned``.

        A ``pass@k`` has the number of tasks with at least k valid samples beside it, ``eval/pass@k_tasks``. A metric
        that only some episodes have, because they report it or because they were cut, has their number beside it,
        ``eval/<metric>_episodes``.
        """
        metrics = {"eval/n": float(self.n), "eval/invalid": float(self.failed), "eval/abandoned": float(self.abandoned)}
        for name, estimate in self.estimates.items():
            metrics[f"eval/{name}"] = estimate.mean
            if not math.isnan(estimate.low):
                metrics[f"eval/{name}_low"] = estimate.low
                metrics[f"eval/{name}_high"] = estimate.high
            if name.startswith("pass@"):
                metrics[f"eval/{name}_tasks"] = float(len(self.per_task[name]))
            elif self.episodes[name] < self.n:
                metrics[f"eval/{name}_episodes"] = float(self.episodes[name])
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
    cut = [episode_cut(episode) for episode in judged]
    for episode, metrics, one in zip(
        judged, counted_metrics([episode.metrics for episode in judged], cut), cut, strict=True
    ):
        if episode.reward is not None:
            values["reward"][episode.task_id].append(episode.reward)
        for role, value in episode.role_rewards.items():
            values[f"reward/{role}"][episode.task_id].append(value)
        for name, value in ({"truncated": float(one)} | metrics).items():
            values[name][episode.task_id].append(value)
    estimates = {name: estimate(list(per_task.values())) for name, per_task in sorted(values.items())}
    samples = max(attempts.values(), default=0)
    per_task = {name: {task: fmean(own) for task, own in of_tasks.items()} for name, of_tasks in values.items()}
    if samples > 1:
        for name, of_tasks in passes(values.get(SUCCESS, {}), samples).items():
            estimates[name] = estimate([[value] for value in of_tasks.values()])
            per_task[name] = of_tasks
    return EvalSummary(
        n=len(judged),
        failed=len(episodes) - len(judged),
        abandoned=sum(episode.abandoned for episode in episodes),
        tasks=len({episode.task_id for episode in judged}),
        samples=samples,
        estimates=estimates,
        per_task=per_task,
        episodes={name: sum(map(len, of_tasks.values())) for name, of_tasks in values.items()},
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
    if within and ((single and set(flat) <= {0.0, 1.0}) or differ_by_rounding(means, means)):
        # Without spread between tasks Student's interval has no width. Wilson's interval over tasks, which counts a
        # task's samples as one, is the cautious choice.
        low, high = proportion_interval(round(mean * len(means)), len(means))
    else:
        low, high = mean_interval(values_per_task)
        if within:
            low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high)
