"""Draws training tasks in a reproducible order and remembers which draws are unfinished.

Guarantees: without a curriculum a draw index is the same task in every run with the same seed, and each epoch is a
permutation of all tasks; with a curriculum the tasks depend on the solve rates, and a draw index is the same task only
within a run and its resumed parts. After a restart the tasks that were drawn but not settled come first, each once.
"""

import json
import random
from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import count, islice, takewhile
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.core.episode import Task
from agentrl.rollout.curriculum import Curriculum

UPCOMING = 8  # draws whose tasks a state holds, to tell other tasks and another order from those of the run


class TaskStream:
    """Stream of (draw index, task).

    Args:
        tasks: All training tasks.
        seed: Seed of the epochs' permutations.
        shuffle: Whether epochs are shuffled.
        epochs: Number of epochs after which the stream ends; ``None``: it is endless.
        curriculum: Chooses the tasks by solve rate; the stream ends when all of them have retired.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        *,
        shuffle: bool = True,
        epochs: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        if not tasks:
            raise ValueError("the training dataset is empty")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(tasks)
        self.curriculum = curriculum
        self._next = 0
        self._again: list[int] = []
        self._open: set[int] = set()
        self._orders: dict[int, Sequence[int]] = {}
        self._by_id = {} if curriculum is None else {task.id: task for task in tasks}
        self._chosen: dict[int, str] = {}  # task ids of the unsettled draws of a curriculum

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to draw: all epochs are drawn, or every task has retired."""
        if self._again:
            return False
        if self._end is not None and self._next >= self._end:
            return True
        return self.curriculum is not None and self.curriculum.exhausted

    @property
    def ended_epochs(self) -> int:
        """Number of epochs that are over: each of their tasks was drawn and settled."""
        return min([self._next, *self._open, *self._again]) // len(self._tasks)

    @property
    def done(self) -> float:
        """Share of the draws of all epochs that are settled, at most 1; 0 in an endless stream."""
        owed = len(self._open) + len(self._again)
        return min(1.0, (self._next - owed) / self._end) if self._end else 0.0  # epochs may be fewer after a resume

    def draw(self) -> tuple[int, Task]:
        """Returns the next draw index and its task.

        Raises:
            LookupError: The stream is exhausted.
        """
        if self.exhausted:
            raise LookupError("no task is left to draw")
        if self._again:
            number = self._again.pop(0)
        else:
            number = self._next
            self._next += 1
            if self.curriculum is not None:
                self._chosen[number] = self.curriculum.draw().id
        self._open.add(number)
        return number, self.task(number)

    def task(self, number: int) -> Task:
        """Returns the task of a draw index; with a curriculum, of one that is not settled."""
        if self.curriculum is not None:
            return self._by_id[self._chosen[number]]
        epoch, position = divmod(number, len(self._tasks))
        if epoch not in self._orders:
            order: Sequence[int] = range(len(self._tasks))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order := list(order))
            self._orders = {epoch: order} | {e: o for e, o in self._orders.items() if e >= epoch - 1}
        return self._tasks[self._orders[epoch][position]]

    def observe(self, number: int, solve_rate: float) -> None:
        """Tell the curriculum, if there is one, the solve rate of an ended group."""
        if self.curriculum is not None:
            self.curriculum.observe(number, self._chosen[number], solve_rate)

    def settle(self, number: int) -> None:
        """Mark a draw as counted in a step (trained on, filtered or failed): a restart does not draw it again."""
        self._open.discard(number)
        self._chosen.pop(number, None)

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        """Returns the state for :meth:`restore`.

        Args:
            held: Unsettled draws whose groups are finished and kept with the state: they are not drawn again.
        """
        unsettled = self._open | set(self._again)
        owed = sorted(unsettled - set(held))
        state: dict[str, Any] = {"next": self._next, "owed": owed, "held": sorted(held)}
        state["chosen"] = [[number, self.task(number).id] for number in sorted(unsettled)]
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state(owed)
        else:
            state["upcoming"] = [[number, *_named(self.task(number))] for number in self._upcoming()]
        return state

    def _upcoming(self) -> list[int]:
        """Returns the draws that come next, beside those that come again."""
        end = self._end
        return list(islice(takewhile(lambda number: end is None or number < end, count(self._next)), UPCOMING))

    def restore(self, state: dict[str, Any]) -> list[int]:
        """Continue from a :meth:`state`; with a curriculum, draws of tasks that no longer exist are left out.

        Returns:
            The unsettled draws that are left out.

        Raises:
            ConfigError: The state is of a run with a curriculum and this one has none, or the reverse; or a draw is
                of another task now, or of one with another row.
        """
        if ("curriculum" in state) != (self.curriculum is not None):
            with_one, without = ("checkpoint", "recipe") if self.curriculum is None else ("recipe", "checkpoint")
            raise ConfigError(
                f"the {with_one} has a rollout.curriculum and the {without} has none: resume with the run's "
                "own settings"
            )
        self._next = state["next"]
        self._again = list(state["owed"])
        self._open = set(state["held"])
        if self.curriculum is None:
            self._check_tasks(state["chosen"], state.get("upcoming", []))
            return []
        self._chosen = {number: task for number, task in state["chosen"] if task in self._by_id}
        self._again = [number for number in self._again if number in self._chosen]
        self._open &= self._chosen.keys()
        self.curriculum.restore(state["curriculum"])
        return [number for number, _ in state["chosen"] if number not in self._chosen]

    def _check_tasks(self, chosen: Sequence[tuple[int, str]], upcoming: Sequence[tuple[int, str, str]]) -> None:
        own = "resume with the run's own seed and train_dataset; for other tasks, start a new run with"
        for number, task in [*chosen, *((number, task) for number, task, _ in upcoming)]:
            if self.task(number).id != task:
                raise ConfigError(
                    f"draw {number} was of task {task} and would be of {self.task(number).id} now: {own} "
                    "model.name=RUN/model"
                )
        for number, task, digest in upcoming:
            if _named(self.task(number))[1] != digest:
                raise ConfigError(f"task {task} has another row than in the run: {own} model.name=RUN/model")


def _named(task: Task) -> tuple[str, str]:
    """Returns a task's id and a digest of its row; objects that are no plain data count with their type alone."""
    text = json.dumps(task.data, skipkeys=True, default=lambda one: type(one).__name__)
    return task.id, blake2b(text.encode(), digest_size=8).hexdigest()


def about_batches(tasks: int, batch_size: int, epochs: int | None) -> str:
    """Says in one line what becomes of batches that do not fit the number of tasks; empty if they do.

    Args:
        tasks: Number of training tasks.
        batch_size: Groups of a trainer step.
        epochs: Passes over the tasks; ``None`` for no limit.
    """
    found = []
    if tasks < batch_size and epochs != 1:
        found.append(
            f"{tasks} tasks are fewer than rollout.batch_size={batch_size}, so a batch draws some of them twice"
        )
    groups = (epochs or 0) * tasks
    rest = groups % batch_size
    if rest:
        found.append(
            f"trainer.epochs={epochs} makes {groups} groups, no multiple of "
            f"rollout.batch_size={batch_size}: the last batch has {rest}, or fewer where groups are filtered or fail"
        )
    return "; ".join(found)
