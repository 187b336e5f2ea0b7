"""Runs coroutines to their end from blocking code, also where an event loop is running already, as in a notebook.

Guarantees: everything that one :class:`EventLoop` runs shares one loop. Where the calling thread has a running loop,
that loop is in a thread of its own, and the caller waits for it. Ctrl-C cancels what runs, waits for its end, and is
then raised.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

Result = TypeVar("Result")


class Runner(Protocol):
    """What runs coroutines: ``asyncio.Runner``, or another with the same interface."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end and returns its result."""
        ...


class EventLoop:
    """An event loop for blocking code; use it as a context manager.

    Args:
        make: Makes the runner of the loop, in the thread in which it runs.
    """

    def __init__(self, make: Callable[[], Runner] = asyncio.Runner) -> None:
        self._thread = ThreadPoolExecutor(1, "agentrl-loop") if _is_running() else None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._stopped = False
        self._runner = make() if self._thread is None else self._thread.submit(make).result()

    def __enter__(self) -> Self:
        if self._thread is None:
            self._runner.__enter__()
        else:
            self._thread.submit(self._runner.__enter__).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            self._runner.__exit__(kind, error, trace)
            return
        with self._thread:
            self._thread.submit(self._runner.__exit__, kind, error, trace).result()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine to its end and returns its result."""
        if self._thread is None:
            return self._runner.run(work)
        try:
            return self._thread.submit(self._runner.run, self._announced(work)).result()
        except KeyboardInterrupt:
            self._cancel(self._thread)
            raise

    async def _announced(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        if self._stopped:  # before it began
            work.close()
            raise asyncio.CancelledError
        return await work

    def _cancel(self, thread: ThreadPoolExecutor) -> None:
        self._stopped = True
        if self._running is not None:
            loop, task = self._running
            loop.call_soon_threadsafe(task.cancel)
        thread.submit(bool).result()  # after what runs


def _is_running() -> bool:
    """Whether this thread has a running event loop, in which no other can run."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
