"""Draws training tasks in a reproducible order and remembers which draws are unfinished.

Guarantees: a draw index is the same task in every run with the same seed; each epoch is a permutation of all
tasks; after a restart the tasks that were drawn but not settled come first, each once.
"""

import random
from collections.abc import Sequence
from typing import Any

from agentrl.core.episode import Task


class TaskStream:
    """Endless stream of (draw index, task).

    Args:
        tasks: All training tasks.
        seed: Seed of the epochs' permutations.
        shuffle: Whether epochs are shuffled.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError("the training dataset is empty")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._next = 0
        self._again: list[int] = []
        self._open: set[int] = set()
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def draw(self) -> tuple[int, Task]:
        """Returns the next draw index and its task."""
        if self._again:
            number = self._again.pop(0)
        else:
            number = self._next
            self._next += 1
        self._open.add(number)
        return number, self.task(number)

    def task(self, number: int) -> Task:
        """Returns the task of a draw index."""
        epoch, position = divmod(number, len(self._tasks))
        if epoch not in self._orders:
            order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order} | {e: o for e, o in self._orders.items() if e >= epoch - 1}
        return self._tasks[self._orders[epoch][position]]

    def settle(self, number: int) -> None:
        """Mark a draw as trained on, filtered or failed: it is not drawn again after a restart."""
        self._open.discard(number)

    def state(self) -> dict[str, Any]:
        """Returns the state for :meth:`restore`: the unsettled draw indices and the next one."""
        return {"next": self._next, "owed": sorted(self._open | set(self._again))}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`."""
        self._next = state["next"]
        self._again = list(state["owed"])
        self._open.clear()
