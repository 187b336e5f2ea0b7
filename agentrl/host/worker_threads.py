"""Threads for blocking code, so that it never blocks the event loop.

Guarantees: a call that is given up (timeout, cancellation) raises at once and takes no thread from the others: Python
cannot stop its thread, which stays busy, but another one is made in its place, up to a bound; at the bound the error
names the functions that hang. Threads are daemons: none keeps the interpreter from ending. Calls may come from any
event loop, one after the other or at the same time.
"""

import asyncio
import contextlib
import contextvars
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from agentrl.host.worker_errors import WorkerTimeoutError, checked_timeout, function_name

MAX_THREADS = 256  # far above what runs at once; 256 stacks of at most 8 MiB are virtual memory only


class HungThreadsError(RuntimeError):
    """Every thread is held by a call that was given up."""


class DaemonThreads:
    """Threads made on demand, kept for the next call, and never waited for at exit.

    Args:
        limit: Threads at most; further calls wait in line.
        name: Prefix of the threads' names.
        leave: Runs in each thread when it ends, after :meth:`close`.
    """

    def __init__(self, limit: int, name: str, leave: Callable[[], None] | None = None) -> None:
        self.limit = limit
        self._name = name
        self._leave = leave
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting = 0

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run ``function`` in a thread; a future that is cancelled while it waits is never run."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting += 1
            if self._waiting > self._idle and len(self._threads) < self.limit:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put((future, function))
        return future

    def close(self) -> list["Future[Any]"]:
        """End the threads once they are free.

        Returns:
            Futures of the calls that no thread has taken yet; none will.
        """
        left: list[Future[Any]] = []
        with contextlib.suppress(Empty):  # a thread may take the last one meanwhile
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    left.append(item[0])
        for _ in self._threads:
            self._queue.put(None)
        return left

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for each thread to end."""
        for thread in self._threads:
            thread.join(timeout)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            item = self._queue.get()
            with self._lock:
                self._idle -= 1
                self._waiting -= item is not None
            if item is None:
                break
            settle(*item)
            del item  # what the call held must not live until the next call
        if self._leave is not None:
            self._leave()


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Run ``function`` and put what became of it into ``future``: the boundary between a call and its thread."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # the boundary: a thread has nobody above it, the caller gets everything
        future.set_exception(_fit(error))
    else:
        future.set_result(result)


def _fit(error: BaseException) -> BaseException:
    """``error``, where a future can carry it into a coroutine; StopIteration and SystemExit mean other things there."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"the function raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


class ThreadCalls:
    """Runs calls in threads, and records those that hang.

    Args:
        limit: Threads at most.
    """

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._threads = DaemonThreads(limit, "agentrl-thread")
        self._hung: dict[Future[Any], str] = {}

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """See :func:`in_thread`."""
        checked_timeout(timeout)
        if len(self._hung) >= self._threads.limit:
            raise HungThreadsError(self._complaint())
        context = contextvars.copy_context()
        future = self._threads.submit(functools.partial(context.run, function, *args))
        waiter = asyncio.wrap_future(future)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await waiter
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise WorkerTimeoutError(f"{function_name(function)} took over {timeout:g} s in a thread") from error
        finally:
            if waiter.cancelled() and not future.cancel():  # it runs, or has just returned
                self._hung[future] = function_name(function)
                future.add_done_callback(self._returned)  # runs at once where it has returned

    def _returned(self, future: "Future[Any]") -> None:
        self._hung.pop(future, None)

    def _complaint(self) -> str:
        counts = Counter(self._hung.copy().values()).most_common(5)
        names = ", ".join(f"{name} ({count})" for name, count in counts)
        return (
            f"all {self._threads.limit} threads are held by calls that were given up and still run: {names}. "
            "Give these functions a time limit of their own, or run them in a process (WorkerPool.run)"
        )


_calls = ThreadCalls()


async def in_thread(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Run blocking ``function`` in a thread, with the caller's context variables.

    For code that releases the GIL or waits; code that computes for long belongs in a process.

    Args:
        function: Any callable.
        args: Positional arguments of ``function``.
        timeout: Seconds after which the call is given up; its thread runs on, its result is dropped.

    Returns:
        What the function returns.

    Raises:
        WorkerTimeoutError: The call exceeded ``timeout``.
        HungThreadsError: All threads are held by calls that were given up; the message names them.
    """
    return await _calls.call(function, *args, timeout=timeout)


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _calls
    _calls = ThreadCalls()


os.register_at_fork(after_in_child=_forget)
