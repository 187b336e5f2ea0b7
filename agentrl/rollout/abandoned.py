"""Holds the tasks of episodes that did not end when they were cancelled.

Guarantees: such a task is left running and is counted until it ends; its late result is dropped, and its late exception
is not printed. Python cannot stop a task that catches its cancellation.
"""

import asyncio
from typing import Any


class Abandoned:
    """Tasks that were given up and still run; ``len`` counts them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, job: "asyncio.Task[Any]") -> None:
        """Give up a task: nobody waits for it any more."""
        self._tasks.add(job)
        job.add_done_callback(self._ended)

    def _ended(self, job: "asyncio.Task[Any]") -> None:
        self._tasks.discard(job)
        if not job.cancelled():
            job.exception()  # asyncio prints an exception that nobody asked for
