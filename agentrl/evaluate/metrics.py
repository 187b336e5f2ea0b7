"""Summarizes finished episodes as metrics with 95% intervals.

Guarantees: a failed episode is counted as invalid and excluded from every mean; one that was cut before it could be
judged, also by the end of the context, is wrong and not invalid; all tasks have equal weight, a task with failed
episodes with its valid ones; an interval that the data cannot give is left out of :meth:`EvalSummary.as_metrics`; a
metric that not all of the judged episodes have says of how many it is.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.core.ending import SUCCESS
from agentrl.core.episode import Episode
from agentrl.evaluate.measures import MEASURES
from agentrl.evaluate.moments import Estimate, Moments
from agentrl.evaluate.pass_at_k import SUBSETS
from agentrl.evaluate.prices import Price
from agentrl.evaluate.tally import STOP, Counts, Tally, TaskScores


@dataclass(frozen=True)
class EvalSummary:
    """Result of an evaluation, or of its tasks with one tag.

    Attributes:
        n: Number of episodes that did not fail.
        failed: Number of episodes that failed; wrong answers are not among them.
        abandoned: Number of episodes whose teardown was given up at its limit, failed or not.
        tasks: Number of tasks with at least one episode that did not fail.
        samples: Largest number of episodes that a task has.
        estimates: Estimate of the reward, of ``reward/<role>`` for roles with a reward of their own, of each metric of
            the episodes, of the share of episodes that were cut (``truncated``), and of ``pass@k``, ``pass^k`` and
            ``maj@k`` up to ``samples`` if ``samples`` > 1.
        per_task: Means over each task's valid samples, by name and task; an estimate is their mean. Empty where they
            were not kept.
        episodes: Number of episodes that each metric of episodes is of; of what is of subsets, the number of tasks.
        measures: Estimates of the effort of the episodes that did not fail, see :mod:`agentrl.evaluate.measures`, and
            of the share of each stop reason, ``stop/<reason>``.
        tags: Summaries of the tasks with each tag.
    """

    n: int
    failed: int
    abandoned: int
    tasks: int
    samples: int
    estimates: dict[str, Estimate]
    per_task: Mapping[str, Mapping[str, float]]
    episodes: dict[str, int]
    measures: dict[str, Estimate] = field(default_factory=dict)
    tags: dict[str, "EvalSummary"] = field(default_factory=dict)

    def as_metrics(self) -> dict[str, float]:
        """Returns flat metrics: ``eval/<metric>`` with ``_low`` and ``_high``, and the counts of episodes.

        The counts are ``eval/n``, ``eval/invalid`` and ``eval/abandoned``. Where episodes are invalid, a metric that
        has bounds is also there as ``_if_wrong`` and ``_if_right``: with all of them wrong, and right.

        Metrics of subsets of k samples have the number of tasks with at least k valid samples beside them,
        ``eval/pass@k_tasks``. A metric that only some episodes have, because they report it or because they were cut,
        has their number beside it, ``eval/<metric>_episodes``.
        """
        metrics = {"eval/n": float(self.n), "eval/invalid": float(self.failed), "eval/abandoned": float(self.abandoned)}
        for name, one in self.estimates.items():
            metrics |= flat(f"eval/{name}", one)
            if name.startswith(SUBSETS):
                metrics[f"eval/{name}_tasks"] = float(self.episodes[name])
            elif self.episodes[name] < self.n:
                metrics[f"eval/{name}_episodes"] = float(self.episodes[name])
        return metrics

    def all_metrics(self) -> dict[str, float]:
        """Returns :meth:`as_metrics` and the measures, in the same form."""
        metrics = self.as_metrics()
        for name, one in self.measures.items():
            metrics |= flat(f"eval/{name}", one)
            if self.episodes[name] < self.n:
                metrics[f"eval/{name}_episodes"] = float(self.episodes[name])
        return metrics


def flat(name: str, one: Estimate) -> dict[str, float]:
    """Returns an estimate as flat metrics; what the data do not give is absent."""
    found = {
        **{name: one.mean, f"{name}_low": one.low, f"{name}_high": one.high},
        **{f"{name}_if_wrong": one.if_wrong, f"{name}_if_right": one.if_right},
    }
    return {key: value for key, value in found.items() if key == name or not math.isnan(value)}


def summarize(episodes: Sequence[Episode], price: Price | None = None) -> EvalSummary:
    """Computes means and intervals over the episodes that did not fail.

    Args:
        episodes: All attempts; those with the same ``task_id`` are samples of one task.
        price: Price of the model's tokens.
    """
    kept = PerTask()
    tally = Tally(None, price, kept.add)
    for episode in episodes:
        tally.add(episode)
    tally.close()
    return summary_of(tally, kept.values)


class PerTask:
    """Scores of tasks by name and task, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, float]] = defaultdict(dict)

    def add(self, task: TaskScores) -> None:
        """Keeps the scores of a task."""
        for name, value in task.scores.items():
            self.values[name][task.task] = value


def summary_of(tally: Tally, per_task: Mapping[str, Mapping[str, float]] | None = None) -> EvalSummary:
    """Returns the estimates of what a closed tally counted."""
    kept = per_task or {}
    tags = {tag: _summary(counts, tally.most, {}, {}) for tag, counts in sorted(tally.by_tag.items())}
    return _summary(tally.total, tally.most, kept, tags)


def _summary(
    counts: Counts, samples: int, per_task: Mapping[str, Mapping[str, float]], tags: dict[str, EvalSummary]
) -> EvalSummary:
    measures = {name: counts.measures[name].estimate() for name in sorted(counts.measures, key=_place)}
    return EvalSummary(
        n=counts.n,
        failed=counts.failed,
        abandoned=counts.abandoned,
        tasks=counts.tasks,
        samples=samples,
        estimates=counts.estimates(),
        per_task=per_task,
        episodes={name: one.episodes for name, one in [*counts.scores.items(), *counts.measures.items()]},
        measures=measures,
        tags=tags,
    )


def _place(name: str) -> tuple[int, str]:
    return (len(MEASURES) if name.startswith(STOP) else MEASURES.index(name)), name


def estimate(values_per_task: Sequence[Sequence[float]]) -> Estimate:
    """Computes the mean over tasks with its interval, see :meth:`agentrl.evaluate.moments.Moments.estimate`.

    Args:
        values_per_task: One non-empty list of values per task.
    """
    moments = Moments()
    for values in values_per_task:
        moments.add(values)
    return moments.estimate()


MAIN = (SUCCESS, "reward")
"""Names of the metrics that say how good a model is; the first one that an evaluation has is its main one."""


def main_metric(estimates: Mapping[str, object]) -> str | None:
    """Returns the name of an evaluation's main metric, ``None`` without one."""
    return next((name for name in MAIN if name in estimates), None)
