"""Counts the episodes of an evaluation as they end, task by task.

Guarantees: the numbers are those of :mod:`agentrl.evaluate.metrics`, whatever the order of the episodes; beside the
tasks that are not finished, memory does not grow with the number of tasks. A task is finished when all its samples
have ended; until the first episode tells an accuracy, tasks with a cut episode wait, because only then is it known that
a cut episode is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean

from agentrl.core.ending import SUCCESS, episode_cut
from agentrl.core.episode import Episode
from agentrl.evaluate.measures import measures_of
from agentrl.evaluate.moments import Estimate, Moments
from agentrl.evaluate.pass_at_k import SUBSETS, of_subsets, pass_at_k, pass_hat_k
from agentrl.evaluate.prices import Price

STOP = "stop/"
"""Beginning of the names of the shares of stop reasons."""


@dataclass(frozen=True)
class Row:
    """An ended episode without its messages.

    Attributes:
        task: Id of its task.
        index: Number of the sample.
        tag: Tag of the task.
        failed: Whether it counts as invalid.
        cut: Whether a limit cut it.
        stop: Reason for the end of the episode.
        scores: Reward, own rewards of roles, the environment's metrics.
        measures: Effort of the episode, see :mod:`agentrl.evaluate.measures`.
        answer: The answer that the environment found.
        abandoned: Whether its teardown was given up.
    """

    task: str
    index: int
    tag: str | None
    failed: bool
    cut: bool
    stop: str
    scores: dict[str, float]
    measures: dict[str, float]
    answer: str | None
    abandoned: bool


def row_of(episode: Episode, price: Price | None = None) -> Row:
    """Returns what counts of an episode."""
    cut = not episode.failed and episode_cut(episode)
    scores: dict[str, float] = {}
    if not episode.failed:
        if episode.reward is not None:
            scores["reward"] = episode.reward
        scores |= {f"reward/{role}": value for role, value in episode.role_rewards.items()}
        scores |= {"truncated": float(cut)} | episode.metrics
    measures = {name: value for name, value in measures_of(episode, price).items() if name not in scores}
    return Row(
        task=episode.task_id,
        index=episode.index,
        tag=episode.tag,
        failed=episode.failed,
        cut=cut,
        stop=str(episode.stop_reason),
        scores=scores,
        measures=measures,
        answer=episode.answer,
        abandoned=episode.abandoned,
    )


@dataclass(frozen=True)
class TaskScores:
    """Scores of a finished task, each the mean over its valid samples.

    Attributes:
        task: Id of the task.
        tag: Tag of the task.
        valid: Number of samples that were judged.
        failed: Number of samples that were not.
        scores: Means by name, and ``pass@k``, ``pass^k`` and ``maj@k`` where a task has several samples.
        samples: Accuracy by number of the sample; empty where none is told.
        digest: Digits that differ where the contents of the task do; empty where they were not told.
    """

    task: str
    tag: str | None
    valid: int
    failed: int
    scores: dict[str, float]
    samples: dict[int, float]
    digest: str = ""


@dataclass
class Counts:
    """Running numbers of a set of tasks: of all, or of those with one tag."""

    n: int = 0
    failed: int = 0
    abandoned: int = 0
    tasks: int = 0
    scores: dict[str, Moments] = field(default_factory=dict)
    measures: dict[str, Moments] = field(default_factory=dict)
    bounds: dict[str, list[float]] = field(default_factory=dict)  # number of tasks, and sums of both bounds

    def add(self, rows: Sequence[Row], scores: Mapping[str, Sequence[float]], bounds: "Bounds") -> None:
        """Adds a task.

        Args:
            rows: Episodes of the task.
            scores: Values of its valid samples by name; one value for what is of subsets of samples.
            bounds: Scores that the task would have if its invalid episodes were wrong, and if they were right.
        """
        valid = [row for row in rows if not row.failed]
        self.failed += len(rows) - len(valid)
        self.abandoned += sum(row.abandoned for row in rows)
        for name, values in scores.items():
            if name not in self.scores:
                self.scores[name] = Moments()
            self.scores[name].add(values)
        for name, (wrong, right) in bounds.items():
            sums = self.bounds.setdefault(name, [0.0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += wrong
            sums[2] += right
        if valid:
            self._add_measures(valid)

    def _add_measures(self, valid: Sequence[Row]) -> None:
        for name in {name for row in valid for name in row.measures}:
            told = [row.measures[name] for row in valid if name in row.measures]
            if name not in self.measures:
                self.measures[name] = Moments(share=False)
            self.measures[name].add(told)
        for stop in {row.stop for row in valid}:
            if f"{STOP}{stop}" not in self.measures:
                moments = self.measures[f"{STOP}{stop}"] = Moments()
                moments.add_zeros(self.tasks, self.n)
        for name, moments in self.measures.items():
            if name.startswith(STOP):
                moments.add([float(row.stop == name.removeprefix(STOP)) for row in valid])
        self.n += len(valid)
        self.tasks += 1

    def estimates(self) -> dict[str, Estimate]:
        """Returns the estimates of the scores by name, sorted; subsets of samples by their size behind the others."""
        found = {}
        for name in sorted(self.scores, key=_place):
            tasks, wrong, right = self.bounds.get(name, (0.0, 0.0, 0.0))
            known = tasks and self.failed
            found[name] = self.scores[name].estimate(*((wrong / tasks, right / tasks) if known else ()))
        return found


Bounds = dict[str, tuple[float, float]]


class Tally:
    """Running numbers of an evaluation.

    Args:
        samples: Number of samples of each task; ``None`` if it differs: then no task is finished before :meth:`close`.
        price: Price of the model's tokens.
        on_task: Called with the scores of each task as it is finished.
    """

    def __init__(
        self, samples: int | None, price: Price | None = None, on_task: Callable[[TaskScores], None] = lambda _: None
    ) -> None:
        self.total = Counts()
        self.by_tag: dict[str, Counts] = {}
        self.graded = False
        self.most = 0
        self._samples = samples
        self._price = price
        self._on_task = on_task
        self._open: dict[str, list[Row]] = {}
        self._waiting: list[list[Row]] = []  # finished tasks with cut episodes, until an accuracy is told

    def add(self, episode: Episode) -> Row:
        """Counts an episode that ended, and returns what counts of it."""
        row = row_of(episode, self._price)
        self.add_row(row)
        return row

    def add_row(self, row: Row) -> None:
        """Counts an episode."""
        rows = self._open.setdefault(row.task, [])
        rows.append(row)
        self.most = max(self.most, len(rows))
        if SUCCESS in row.scores and not self.graded:
            self.graded = True
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._fold(one)
        if len(rows) == self._samples:
            self._finish(self._open.pop(row.task))

    def close(self) -> None:
        """Counts the tasks that are not finished with the episodes that there are."""
        for rows in [*self._open.values(), *self._waiting]:
            self._fold(rows)
        self._open, self._waiting = {}, []

    def copy_closed(self) -> "Tally":
        """Returns a copy in which all tasks are counted, for a look in between."""
        other = Tally(self._samples, self._price)
        other.total, other.by_tag = deepcopy(self.total), deepcopy(self.by_tag)
        other.graded, other.most = self.graded, self.most
        other._open, other._waiting = dict(self._open), list(self._waiting)
        other.close()
        return other

    def _finish(self, rows: list[Row]) -> None:
        if not self.graded and any(row.cut for row in rows):
            self._waiting.append(rows)
        else:
            self._fold(rows)

    def _fold(self, rows: list[Row]) -> None:
        valid = [row for row in rows if not row.failed]
        accuracies = [_accuracy(row, self.graded) for row in valid]
        scores: dict[str, list[float]] = {}
        for row, accuracy in zip(valid, accuracies, strict=True):
            for name, value in row.scores.items():
                scores.setdefault(name, []).append(value)
            if SUCCESS not in row.scores and accuracy is not None:
                scores.setdefault(SUCCESS, []).append(accuracy)
        samples = self._samples or self.most
        votes = [(row.answer, one) for row, one in zip(valid, accuracies, strict=True) if one is not None]
        per_task = {name: fmean(values) for name, values in scores.items()}
        if samples > 1 and votes:
            of_sets = of_subsets(votes, samples)
            per_task |= of_sets
            scores |= {name: [value] for name, value in of_sets.items()}
        bounds = _bounds(rows, accuracies, samples) if self.graded else {}
        self.total.add(rows, scores, bounds)
        tag = rows[0].tag
        if tag is not None:
            self.by_tag.setdefault(tag, Counts()).add(rows, scores, bounds)
        told = {row.index: one for row, one in zip(valid, accuracies, strict=True) if one is not None}
        failed = len(rows) - len(valid)
        self._on_task(TaskScores(rows[0].task, tag, len(valid), failed, per_task, told))


def _accuracy(row: Row, graded: bool) -> float | None:
    return row.scores.get(SUCCESS, 0.0 if row.cut and graded else None)


def _bounds(rows: Sequence[Row], accuracies: Sequence[float | None], samples: int) -> Bounds:
    """Returns the scores of a task if its invalid episodes were all wrong, and if they were all right."""
    told = [one for one in accuracies if one is not None]
    failed = sum(row.failed for row in rows)
    n = len(told) + failed
    if not n or any(not 0 <= one <= 1 for one in told):
        return {}
    found = {SUCCESS: (sum(told) / n, (sum(told) + failed) / n)}
    if samples > 1:
        right = sum(one >= 1 for one in told)
        for k in range(1, min(samples, n) + 1):
            found[f"pass@{k}"] = (pass_at_k(n, right, k), pass_at_k(n, right + failed, k))
            found[f"pass^{k}"] = (pass_hat_k(n, right, k), pass_hat_k(n, right + failed, k))
    return found


def _place(name: str) -> tuple[int, int, str]:
    for place, beginning in enumerate(SUBSETS, start=1):
        if name.startswith(beginning):
            return place, int(name.removeprefix(beginning)), name
    return 0, 0, name
