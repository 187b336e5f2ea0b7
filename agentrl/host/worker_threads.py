"""Runs blocking code in threads, so that it never blocks the event loop.

Guarantees: a call that is given up (timeout, cancellation) raises at once. Python cannot stop its thread, which stays
busy, so another thread is made for other calls, up to a limit; at the limit, an error names the functions that hang.
Threads are daemons, so none keeps the interpreter from ending. Calls may come from several event loops, also at the
same time.
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

MAX_THREADS = 256  # far more than run at once; their stacks of at most 8 MiB take only virtual memory


class HungThreadsError(RuntimeError):
    """All threads are busy with calls that were given up."""


class DaemonThreads:
    """Thread pool that starts threads on demand, and does not wait for them when the interpreter ends.

    Args:
        limit: Most threads; further calls wait in a queue.
        name: Prefix of the threads' names.
        leave: Function that each thread calls at its end, after :meth:`close`.
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
        """Run ``function`` in a thread; cancelling its future in the queue means that it never runs."""
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
            Futures of the queued calls, which will never run.
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
            del item  # frees the call's objects before the next call arrives
        if self._leave is not None:
            self._leave()


def settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Run ``function`` and put its result or error into ``future``."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # the boundary: nothing else catches a thread's errors, so the caller gets all
        future.set_exception(_fit(error))
    else:
        future.set_result(result)


def _fit(error: BaseException) -> BaseException:
    """Returns ``error``, wrapped if a coroutine cannot raise it, as StopIteration and SystemExit."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"the function raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


class ThreadCalls:
    """Runs calls in threads, and records those that hang.

    Args:
        limit: Most threads.
    """

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._threads = DaemonThreads(limit, "agentrl-thread")
        self._hung: dict[Future[Any], str] = {}

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """Run blocking ``function`` in a thread, see :func:`in_thread`."""
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
                raise  # the function itself raised it
            raise WorkerTimeoutError(f"{function_name(function)} took over {timeout:g} s in a thread") from error
        finally:
            if waiter.cancelled() and not future.cancel():  # the function is running, or has just returned
                self._hung[future] = function_name(function)
                future.add_done_callback(self._returned)  # called at once if the function has returned

    def _returned(self, future: "Future[Any]") -> None:
        self._hung.pop(future, None)

    def _complaint(self) -> str:
        counts = Counter(self._hung.copy().values()).most_common(5)
        names = ", ".join(f"{name} ({count})" for name, count in counts)
        return (
            f"all {self._threads.limit} threads are busy with calls that were given up and still run: {names}. "
            "Give these functions a time limit of their own, or run them in a process (WorkerPool.run)"
        )


_calls = ThreadCalls()


async def in_thread(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """Run blocking ``function`` in a thread, with the caller's context variables.

    Use it for code that waits or releases the GIL; run long computations in a process (``WorkerPool``).

    Args:
        function: Any callable.
        args: Positional arguments of ``function``.
        timeout: Seconds after which the call is given up; the thread continues, and its result is dropped.

    Returns:
        The function's result.

    Raises:
        WorkerTimeoutError: The call exceeded ``timeout``.
        HungThreadsError: All threads are busy with calls that were given up; the message names them.
    """
    return await _calls.call(function, *args, timeout=timeout)


def _forget() -> None:
    """Makes a new pool in a forked child, which has no threads of its parent."""
    global _calls
    _calls = ThreadCalls()


os.register_at_fork(after_in_child=_forget)
