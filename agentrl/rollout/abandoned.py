"""Leaves tasks that do not end when they are cancelled.

Guarantees: such a task is left running and is counted until it ends; asyncio does not wait for it at the end of a
process, its late result is dropped, and nothing is printed of it. Python cannot stop a task that catches its
cancellation.
"""

import asyncio
import ctypes
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
        job.add_done_callback(self._tasks.discard)
        leave(job)


def leave(task: "asyncio.Task[Any]") -> None:
    """Leaves a task that runs on: asyncio no longer cancels it, waits for it or complains about it.

    It is kept alive until it ends, also while the interpreter ends: a coroutine that catches everything would go on in
    an endless loop when it is destroyed.
    """
    owned = ctypes.py_object(task)
    ctypes.pythonapi.Py_IncRef(owned)

    def ended(job: "asyncio.Task[Any]") -> None:
        take_error(job)
        ctypes.pythonapi.Py_DecRef(owned)

    task.add_done_callback(ended)
    asyncio.tasks._unregister_task(task)


def take_error(task: "asyncio.Task[Any]") -> None:
    """Asks for a done task's exception: asyncio prints one that nobody asked for."""
    if not task.cancelled():
        task.exception()
