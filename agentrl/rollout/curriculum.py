"""Chooses training tasks by their solve rate: solved tasks retire, hard ones come less often, pools open in order.

The solve rate of a group is the share of its valid episodes that solved the task. Online difficulty pools are those of
prime-rl's buffer (easy, normal, hard), and drawing by solve rate is Kimi k1.5's sampling (arXiv:2501.12599, section
2.3.4); filtering the uniform groups that remain is DAPO's (arXiv:2503.14476).

Guarantees: pure: the next task is a function of the seed and of the sequence of draws and observed groups, no clock and
no I/O. A retired task is never drawn again, and an open pool stays open. A state holds no observation of a group that
will be drawn again after a resume.
"""

import random
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.config.errors import DataError
from agentrl.config.rollout import CurriculumConfig
from agentrl.core.episode import Task

Value = str | int | float


class Observation(NamedTuple):
    """Solve rate of one group, with its draw index."""

    draw: int
    solve_rate: float


class Curriculum:
    """Order of the training tasks that follows the policy's solve rates.

    Args:
        tasks: All training tasks.
        config: The recipe's ``rollout.curriculum`` section.
        seed: Seed of the passes' orders.
        shuffle: Whether passes are shuffled.

    Raises:
        DataError: A task has no value, or an unknown one, in ``rollout.curriculum.column``.
    """

    def __init__(self, tasks: Sequence[Task], config: CurriculumConfig, seed: int, *, shuffle: bool = True) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._config = config
        self._seed = seed
        self._shuffle = shuffle
        self._pools = pools_of(tasks, config)  # ids of the tasks, pool by pool
        self._pool_of = {task: number for number, pool in enumerate(self._pools) for task in pool}
        self._open = 1  # number of open pools
        self._seen: dict[str, list[Observation]] = {}
        self._retired: dict[str, list[int]] = {}  # retired task -> draws of the groups that were solved
        self._latest: list[list[Observation]] = [[] for _ in self._pools]  # of each pool, for its gate
        self._pass = 0
        self._queue: list[str] = []  # rest of the current pass

    @property
    def exhausted(self) -> bool:
        """Whether every task has retired."""
        return len(self._retired) == len(self._tasks)

    def draw(self) -> Task:
        """Returns the next task.

        Raises:
            LookupError: Every task has retired.
        """
        if self.exhausted:
            raise LookupError("every task has retired")
        while True:
            while self._queue:
                task = self._queue.pop(0)
                if task not in self._retired:
                    return self._tasks[task]
            self._next_pass()

    def observe(self, draw: int, task: str, solve_rate: float) -> None:
        """Take the solve rate of an ended group into account."""
        seen = Observation(draw, solve_rate)
        self._seen.setdefault(task, []).append(seen)
        self._latest[self._pool_of[task]].append(seen)
        if task not in self._retired and self._solved(task):
            self._retired[task] = [one.draw for one in self._seen[task][-self._config.retire_after :]]
        if self._may_open():
            self._open += 1
            self._queue = []  # a new pass, so that the new tasks come at once

    def metrics(self) -> dict[str, float]:
        """Returns the hardest open pool (from 1), its solve rate, and the numbers of retired and hard tasks."""
        found = {"curriculum/pool": float(self._open)}
        rate = self._gate_rate()
        if rate is not None:
            found["curriculum/solve_rate"] = rate
        if self._config.retire_at is not None:
            found["curriculum/retired"] = float(len(self._retired))
        if self._config.hard_at is not None:
            found["curriculum/hard"] = float(sum(self._hard(task) for task in self._seen))
        return found

    def state(self, owed: Collection[int]) -> dict[str, Any]:
        """Returns the state for :meth:`restore`, as plain data.

        Args:
            owed: Draws that will be drawn again after a resume; their observations are left out.
        """
        repeated = set(owed)

        def kept(seen: list[Observation], most: int) -> list[list[float]]:
            return [list(one) for one in [one for one in seen if one.draw not in repeated][-most:]]

        tasks = {task: kept(seen, self._longest) for task, seen in self._seen.items()}
        return {
            "open": self._open,
            "pass": self._pass,
            "queue": self._queue,
            "retired": {task: draws for task, draws in self._retired.items() if not repeated & set(draws)},
            "seen": {task: seen for task, seen in tasks.items() if seen},
            "latest": [kept(seen, self._config.open_groups) for seen in self._latest],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`; tasks that are no longer in the dataset are left out."""
        self._open = min(state["open"], len(self._pools))
        self._pass = state["pass"]
        self._queue = [task for task in state["queue"] if task in self._tasks]
        self._seen = {task: _read(seen) for task, seen in state["seen"].items() if task in self._tasks}
        self._retired = {task: draws for task, draws in state["retired"].items() if task in self._tasks}
        self._latest = [_read(seen) for seen in state["latest"]][: len(self._pools)]
        self._latest += [[] for _ in self._pools[len(self._latest) :]]

    @property
    def _longest(self) -> int:
        """Number of observations of a task that its rules look at."""
        return max(self._config.window, self._config.retire_after)

    def _solved(self, task: str) -> bool:
        """Whether a task's latest groups reached the solve rate at which it retires."""
        bound, last = self._config.retire_at, self._seen[task][-self._config.retire_after :]
        enough = len(last) == self._config.retire_after
        return bound is not None and enough and all(one.solve_rate >= bound for one in last)

    def _hard(self, task: str) -> bool:
        bound, last = self._config.hard_at, self._seen.get(task, [])[-self._config.window :]
        return bound is not None and len(last) > 0 and fmean(one.solve_rate for one in last) <= bound

    def _gate_rate(self) -> float | None:
        """Returns the mean solve rate of the latest groups of the hardest open pool; ``None`` without any."""
        last = self._latest[self._open - 1][-self._config.open_groups :]
        return fmean(one.solve_rate for one in last) if last else None

    def _may_open(self) -> bool:
        if self._open == len(self._pools) or len(self._latest[self._open - 1]) < self._config.open_groups:
            return False
        rate = self._gate_rate()
        return rate is not None and rate >= self._config.open_at

    def _next_pass(self) -> None:
        """Starts a pass over the open pools; opens the next pool when all tasks of the open ones have retired."""
        drawn = [task for pool in self._pools[: self._open] for task in pool if task not in self._retired]
        if not drawn:
            self._open += 1
            return
        with_hard = self._pass % self._config.hard_every == 0
        self._queue = [task for task in drawn if with_hard or not self._hard(task)]
        if self._shuffle:
            random.Random(f"{self._seed}/{self._pass}").shuffle(self._queue)
        self._pass += 1


def pools_of(tasks: Sequence[Task], config: CurriculumConfig) -> list[list[str]]:
    """Sorts the ids of the tasks into pools, easiest first; one pool without a column.

    Raises:
        DataError: A task has no value, or an unknown one, in ``rollout.curriculum.column``.
    """
    if config.column is None:
        return [[task.id for task in tasks]]
    found: dict[Value, list[str]] = {}
    for task in tasks:
        if config.column not in task.data:
            raise DataError(
                f"rollout.curriculum.column={config.column}: task {task.id} has no such column, only "
                f"{', '.join(map(str, task.data))}"
            )
        value = task.data[config.column]
        if not isinstance(value, str | int | float):
            raise DataError(
                f"rollout.curriculum.column={config.column}: task {task.id} has {value!r}, which is neither a number "
                "nor text"
            )
        found.setdefault(value, []).append(task.id)
    order = config.pools or _ascending(found, config.column)
    strange = [value for value in found if value not in order]
    if strange:
        raise DataError(
            f"rollout.curriculum.pools={list(order)} does not name {strange[0]!r}, which task {found[strange[0]][0]} "
            f"has in rollout.curriculum.column={config.column}"
        )
    return [found[value] for value in order if value in found]


def _ascending(values: Collection[Any], column: str) -> list[Value]:
    text = [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]
    if text:
        raise DataError(
            f"rollout.curriculum.column={column} has the value {text[0]!r}, which is not a number: set "
            "rollout.curriculum.pools to its values, easiest first"
        )
    return sorted(values)


def _read(seen: Sequence[Sequence[float]]) -> list[Observation]:
    return [Observation(int(draw), rate) for draw, rate in seen]
