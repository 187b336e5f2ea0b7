"""Runs a process's main coroutine, and ends in time whatever other tasks and threads do.

Guarantees: after the coroutine's end, and after Ctrl-C, all other tasks are cancelled and have ``seconds`` to end;
those that run on are left, and so are threads of ``asyncio.to_thread``, where ``asyncio.run`` would wait for them for
ever. Nothing is printed of them. :func:`end_within` bounds the wait for all other threads when the interpreter ends.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from agentrl.host.worker_threads import MAX_THREADS, DaemonThreads
from agentrl.rollout.abandoned import leave, take_error

T = TypeVar("T")
END_SECONDS = 5.0  # for the interpreter's own end, which waits for threads of user code


class BoundedRunner:
    """Runs coroutines one after the other in one event loop, as ``asyncio.Runner`` does.

    Args:
        seconds: Time that the tasks that they leave have to end after their cancellation.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_default_executor(_DaemonExecutor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.get_loop().run_until_complete(_end_others(self._seconds))
        self._runner.close()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` to its end; returns its result."""
        return self._runner.run(main)


def bounded_run(main: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run ``main`` in a new event loop, as ``asyncio.run`` does; ``seconds`` is that of :class:`BoundedRunner`."""
    with BoundedRunner(seconds) as runner:
        return runner.run(main)


def end_within(seconds: float, code: int, *, end: Callable[[int], object] = os._exit) -> threading.Thread:
    """Make this process end at most ``seconds`` after its main thread, also if a thread of user code still runs.

    Args:
        seconds: Time for the interpreter's own end, which waits for all threads that are no daemons.
        code: Exit code, if it does not end by itself.
        end: Function that ends the process with an exit code.

    Returns:
        The thread that watches; a daemon.
    """

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end(code)

    thread = threading.Thread(target=watch, name="agentrl-end", daemon=True)
    thread.start()
    return thread


async def _end_others(seconds: float) -> None:
    """Cancels all other tasks and closes async generators; leaves those that are not done in time."""
    me = asyncio.current_task()
    others = asyncio.all_tasks() - {me}
    for task in others:
        task.cancel()
    generators = asyncio.create_task(asyncio.get_running_loop().shutdown_asyncgens())
    await asyncio.wait({generators, *others}, timeout=seconds)
    for task in {generators, *others, *asyncio.all_tasks()} - {me}:
        if task.done():
            take_error(task)
        else:
            leave(task)


class _DaemonExecutor(ThreadPoolExecutor):
    """Executor of ``asyncio.to_thread`` whose threads do not keep the process from ending."""

    def __init__(self) -> None:
        super().__init__()
        self._daemons = DaemonThreads(MAX_THREADS, "agentrl-to-thread")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run ``fn`` in a daemon thread."""
        return self._daemons.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that are free, and wait for none."""
        for future in self._daemons.close():
            future.cancel()
