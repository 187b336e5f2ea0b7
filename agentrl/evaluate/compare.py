"""Compares two evaluations on the same tasks and seeds.

Guarantees: only tasks that both judged, with equal contents, are compared, each with equal weight; where both took as
many samples with the same seeds, also only samples that both judged. The interval and the p-value are of the
differences by task, so that what makes one task harder than another cancels. A p-value is exact (McNemar 1947,
Psychometrika 12(2), as a binomial test of the tasks that flipped) where each task is right or wrong, and Student's of
the paired differences otherwise, with the degrees of freedom of their interval.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.ending import SUCCESS
from agentrl.evaluate.intervals import differ_by_rounding, telling_values
from agentrl.evaluate.judged import RESULT, SETUP
from agentrl.evaluate.paired import Change, change
from agentrl.evaluate.setup import differences
from agentrl.evaluate.stored import TASKS, read_tasks
from agentrl.evaluate.tally import TaskScores

Pair = tuple[dict[str, float], dict[str, float]]
"""Scores of a task in the first and in the second evaluation."""


class CompareError(UserError):
    """Two evaluations cannot be compared."""


@dataclass(frozen=True)
class Difference:
    """Difference of a metric between two evaluations, the second minus the first.

    Attributes:
        first: Mean of the first evaluation over the tasks compared.
        second: Mean of the second.
        change: The difference, its 95% interval, and the number of tasks compared.
        p: Two-sided p-value of no difference; 1 where no task differs.
        gained: Ids of the tasks that became better.
        lost: Ids of the tasks that became worse.
    """

    first: float
    second: float
    change: Change
    p: float
    gained: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two evaluations.

    Attributes:
        differences: Differences by metric.
        setups: Differences of the set-ups, as texts.
        tasks: Number of tasks that both judged.
        only: Numbers of tasks that only the first, and only the second judged.
        changed: Number of tasks of the same id whose contents differ; they are not compared.
    """

    differences: dict[str, Difference]
    setups: tuple[str, ...]
    tasks: int
    only: tuple[int, int]
    changed: int


@dataclass(frozen=True)
class Scored:
    """Scores of an evaluation as its folder holds them.

    Attributes:
        setup: Set-up of the evaluation.
        tasks: Scores of the tasks by id.
    """

    setup: dict[str, Any]
    tasks: dict[str, TaskScores]


def compare(first: Path, second: Path) -> Comparison:
    """Compares two evaluations.

    Args:
        first: Folder of an evaluation, or the file ``eval-<step>.json`` of a training.
        second: The other one.

    Raises:
        CompareError: One is no evaluation, or both judged no task together.
    """
    before, after = read_scored(first), read_scored(second)
    common = [task for task in before.tasks if task in after.tasks]
    same = [task for task in common if _same(before.tasks[task], after.tasks[task])]
    judged = [task for task in same if before.tasks[task].valid and after.tasks[task].valid]
    if not judged:
        why = "they have no task in common" if not same else "no task was judged in both"
        raise CompareError(f"{first} and {second} cannot be compared: {why}")
    pairs = [_paired(before.tasks[task], after.tasks[task], before.setup, after.setup) for task in judged]
    names = dict.fromkeys(name for one, other in pairs for name in one if name in other)
    found = {name: _difference(name, judged, pairs) for name in names}
    valid = [sum(one.valid > 0 for one in side.tasks.values()) for side in (before, after)]
    different = differences(before.setup, after.setup)
    return Comparison(
        differences=found,
        setups=tuple(one for one in different if not one.startswith(("prompt:", "tasks_digest:"))),
        tasks=len(judged),
        only=(valid[0] - len(judged), valid[1] - len(judged)),
        changed=len(common) - len(same),
    )


def read_scored(path: Path) -> Scored:
    """Reads the scores of an evaluation.

    Raises:
        CompareError: There is none.
    """
    try:
        if (path / TASKS).is_file():
            return Scored(json.loads((path / SETUP).read_bytes()), {one.task: one for one in read_tasks(path)})
        file = path / RESULT if path.is_dir() else path
        found = json.loads(file.read_bytes())
        return Scored(found.get("setup", {}), _by_task(found["per_task"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompareError(
            f"{path} holds no scores of an evaluation ({type(error).__name__}: {error}): want the folder of an "
            "`agentrl eval`, or the file eval-<step>.json of a training"
        ) from error


def _by_task(per_task: Mapping[str, Mapping[str, float]]) -> dict[str, TaskScores]:
    """Turns scores by metric and task, as older folders and trainings have them, into scores by task."""
    names = dict.fromkeys(task for of_tasks in per_task.values() for task in of_tasks)
    return {
        task: TaskScores(
            task, None, 1, 0, {name: of_tasks[task] for name, of_tasks in per_task.items() if task in of_tasks}, {}
        )
        for task in names
    }


def _same(one: TaskScores, other: TaskScores) -> bool:
    return not (one.digest and other.digest) or one.digest == other.digest


def _paired(
    one: TaskScores, other: TaskScores, setup: Mapping[str, Any], other_setup: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the scores of a task in both evaluations; the accuracy is of the samples that both judged."""
    scores = dict(one.scores), dict(other.scores)
    seeded = all(setup.get(key) == other_setup.get(key) for key in ("samples", "seed"))
    both = sorted(one.samples.keys() & other.samples.keys())
    if seeded and both and SUCCESS in scores[0] and SUCCESS in scores[1]:
        scores[0][SUCCESS] = fmean(one.samples[index] for index in both)
        scores[1][SUCCESS] = fmean(other.samples[index] for index in both)
    return scores


def _difference(name: str, tasks: Sequence[str], pairs: Sequence[Pair]) -> Difference:
    both = zip(tasks, pairs, strict=True)
    told = [(task, one[name], other[name]) for task, (one, other) in both if name in one and name in other]
    before, after = [one for _, one, _ in told], [other for _, _, other in told]
    return Difference(
        first=fmean(before),
        second=fmean(after),
        change=change(before, after),
        p=p_value(before, after),
        gained=tuple(task for task, one, other in told if other > one),
        lost=tuple(task for task, one, other in told if other < one),
    )


def p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Computes the two-sided p-value of no difference between the values of the same tasks, in the same order."""
    gained = sum(other > one for one, other in zip(before, after, strict=True))
    lost = sum(other < one for one, other in zip(before, after, strict=True))
    if not gained + lost:
        return 1.0
    if {*before, *after} <= {0.0, 1.0}:
        from scipy.stats import binomtest

        return float(binomtest(gained, gained + lost).pvalue)
    moved = [other - one for one, other in zip(before, after, strict=True)]
    if len(moved) < 2 or differ_by_rounding(moved, (*before, *after)):
        return float("nan")  # one difference, or equal ones: no spread to hold it against
    from scipy.stats import t

    statistic = fmean(moved) / (stdev(moved) / math.sqrt(len(moved)))
    return float(2 * t.sf(abs(statistic), min(len(moved) - 1, telling_values(moved) + 1)))
