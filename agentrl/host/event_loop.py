"""Runs coroutines to their end from blocking code, also where an event loop is running already, as in a notebook.

Guarantees: everything that one :class:`EventLoop` runs shares one loop. Where the calling thread has a running loop, or
is not the main thread, that loop is in a daemon thread of its own, and the caller waits for it. Ctrl-C cancels what
runs, waits for its end, and is then raised. :meth:`EventLoop.leave` ends the wait for a loop that is blocked.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from agentrl.host.worker_threads import DaemonThreads

Result = TypeVar("Result")
WAKE_SECONDS = 0.2  # a signal that comes just before a wait does not end it, and is handled when the next one begins
END_SECONDS = 5.0  # for the thread of a loop that is closed


class Runner(Protocol):
    """Runner of coroutines: ``asyncio.Runner``, or another with the same interface."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def run(self, main: Coroutine[Any, Any, Any], /) -> Any:
        """Runs a coroutine to its end and returns its result."""
        ...


class EventLoop:
    """An event loop for blocking code; use it as a context manager.

    Args:
        make: Makes the runner of the loop, in the thread in which it runs.
    """

    def __init__(self, make: Callable[[], Runner] = asyncio.Runner) -> None:
        self._thread = None if _may_run_here() else DaemonThreads(1, "agentrl-loop")
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._stopped = False
        self._left: Exception | None = None
        self._runner = self._call(make)

    def __enter__(self) -> Self:
        self._call(self._runner.__enter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave = partial(self._runner.__exit__, kind, error, trace)
        if self._thread is None:
            leave()
        elif self._left is not None:
            self._thread.submit(leave)  # runs once the loop is no longer blocked; the thread is a daemon
        else:
            self._call(leave)
            self._thread.close()
            self._thread.join(END_SECONDS)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine to its end and returns its result.

        Raises:
            Exception: What the coroutine raised, or what :meth:`leave` was given.
        """
        if self._thread is None:
            return self._runner.run(work)
        try:
            return self._call(partial(self._runner.run, self._announced(work)))
        except KeyboardInterrupt:
            self._cancel()
            self._call(bool)  # waits for the end of what runs
            raise

    def leave(self, error: Exception) -> bool:
        """Ends the wait of a caller beside the loop: ``run`` raises ``error``. What runs is cancelled when it can be.

        Returns:
            Whether there is such a caller; a loop in the main thread cannot be left.
        """
        if self._thread is None:
            return False
        self._cancel()
        self._left = error
        return True

    def _call(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the loop's thread."""
        if self._thread is None:
            return function()
        job: Future[Any] = self._thread.submit(function)
        while not job.done():
            if self._left is not None:
                raise self._left
            wait([job], timeout=WAKE_SECONDS)
        return job.result()

    async def _announced(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        if self._stopped:  # before it began
            work.close()
            raise asyncio.CancelledError
        return await work

    def _cancel(self) -> None:
        self._stopped = True
        if self._running is not None:
            loop, task = self._running
            loop.call_soon_threadsafe(task.cancel)


def _may_run_here() -> bool:
    """Whether a loop may run in this thread: it is the main thread, which signals reach, and has no running loop."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False
