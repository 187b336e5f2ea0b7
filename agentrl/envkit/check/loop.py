"""Runs all of the user's code on an event loop in a separate thread, each call with a deadline.

Guarantees: whatever a call does (raise SystemExit, wait for ever, block the thread, swallow its cancellation), its
caller gets an :class:`Outcome` in bounded time. If a call blocks the thread and cannot be interrupted, later calls
raise :class:`LoopLostError` at once.
"""

import asyncio
import ctypes
import inspect
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.envkit.check.source_lines import UserLines
from agentrl.envkit.check.stalls import StallWatch

ANSWER_SECONDS = 1.0  # time for the loop to respond, and for a cancelled call to end


class CannotGoOnError(Exception):
    """Raised when no more calls are possible; the text is the reason why checks are skipped."""


class LoopLostError(CannotGoOnError):
    """Raised when an earlier call blocks the loop's thread."""


class OutOfTimeError(CannotGoOnError):
    """Raised when the time for the whole check is used up."""


class _FreedError(BaseException):
    """Raised inside a call that blocks the loop, to interrupt it."""


@dataclass(frozen=True)
class Outcome:
    """Result of a call.

    Attributes:
        value: Return value of the call.
        error: Exception that the call raised, of any kind.
        hung: Line at which the call was stuck at its deadline, empty if unknown; ``None`` if the call ended.
        suspensions: Number of times the call suspended.
        seconds: Duration of the call.
    """

    value: Any = None
    error: BaseException | None = None
    hung: str | None = None
    suspensions: int = 0
    seconds: float = 0.0


class EnvLoop:
    """The event loop and its thread; a context manager.

    Args:
        lines: Finds the user's source lines.
        call_seconds: Time limit of one call, in seconds.
        total_seconds: Time limit of all calls together, in seconds.
    """

    def __init__(self, lines: UserLines, call_seconds: float, total_seconds: float) -> None:
        self.strays: list[tuple[str, str]] = []  # unhandled errors of background tasks: text and line
        self._lines = lines
        self.call_seconds = call_seconds
        self._until = time.monotonic() + total_seconds
        self._lost = ""
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(thread_name_prefix="envcheck")
        self._loop.set_default_executor(self._pool)
        self._loop.set_exception_handler(self._stray)
        self._thread = threading.Thread(target=self._serve, name="envcheck-loop", daemon=True)

    def __enter__(self) -> "EnvLoop":
        self._thread.start()
        self.watch = StallWatch(self._loop, self._thread, self._lines)
        return self

    def __exit__(self, *exception: object) -> None:
        self.watch.close()
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(ANSWER_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def call(self, label: str, function: Callable[..., Any], *args: Any, cancel_at: int = 0, **kwargs: Any) -> Outcome:
        """Call a function on the loop, and await its result if that is awaitable.

        Args:
            label: Name of the call in reported stalls; empty to record no stalls.
            function: Any callable.
            args: Positional arguments of ``function``.
            cancel_at: Number of the suspension at which the call is cancelled; 0 for never.
            kwargs: Keyword arguments of ``function``.

        Raises:
            LoopLostError: An earlier call blocks the thread.
            OutOfTimeError: The time for all calls is used up.
        """
        if self._lost:
            raise LoopLostError(f"the event loop is still blocked at {self._lost}")
        seconds = min(self.call_seconds, self._until - time.monotonic())
        if seconds <= 0:
            raise OutOfTimeError("the time for the whole check was used up")
        tasks: list[asyncio.Task[Any]] = []
        future: Future[Outcome] = asyncio.run_coroutine_threadsafe(
            _attempt(lambda: function(*args, **kwargs), cancel_at, tasks), self._loop
        )
        self.watch.watch(label)
        try:
            return future.result(seconds)
        except WaitTimeoutError:
            return self._give_up(label, tasks, future, seconds)
        finally:
            self.watch.watch("")

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Raise the time limit of a call to at least this within the context."""
        before, self.call_seconds = self.call_seconds, max(seconds, self.call_seconds)
        try:
            yield
        finally:
            self.call_seconds = before

    def tasks(self) -> set["asyncio.Task[Any]"]:
        """Returns the unfinished tasks of the loop."""
        return self.call("", lambda: asyncio.all_tasks() - {asyncio.current_task()}).value or set()

    def _give_up(
        self, label: str, tasks: list["asyncio.Task[Any]"], future: "Future[Outcome]", seconds: float
    ) -> Outcome:
        if self._answers():
            others = [task for task in asyncio.all_tasks(self._loop) if task not in tasks]
            where = self._lines.of_tasks([*tasks, *others])
            for task in tasks:
                self._loop.call_soon_threadsafe(task.cancel)
            _ended_within(future, ANSWER_SECONDS)
            return Outcome(hung=where, seconds=seconds)
        where = self._lines.of_frame(sys._current_frames().get(self._thread.ident or 0))
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_FreedError))
        if not _ended_within(future, ANSWER_SECONDS) or not self._answers():
            self._lost = where or label
        return Outcome(hung=where, seconds=seconds)

    def _answers(self) -> bool:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(ANSWER_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised in a task of the environment
                self.strays.append((f"a task raised {error!r}", self._lines.of_error(error)))
            except _FreedError:
                pass  # it arrived after the call had ended
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = f"{context.get('message')}: {error!r}" if error else str(context.get("message"))
        self.strays.append((text, self._lines.of_error(error) if error else ""))


async def _attempt(function: Callable[[], Any], cancel_at: int, tasks: list["asyncio.Task[Any]"]) -> Outcome:
    """Runs the user's code and turns any result or exception into an outcome."""
    task = asyncio.current_task()
    assert task is not None
    tasks.append(task)
    started, counted = time.perf_counter(), None
    value, error = None, None
    try:
        value = function()
        if inspect.isawaitable(value):
            counted = _Counted(value, cancel_at)
            value = await counted
    except BaseException as caught:  # the user's code may raise anything, SystemExit and cancellation included
        value, error = None, caught
    waits = counted.suspensions if counted is not None else 0
    return Outcome(value, error, None, waits, time.perf_counter() - started)


class _Counted(Generator[Any, Any, Any]):
    """An awaitable that counts its suspensions, and cancels its task at one of them."""

    def __init__(self, awaited: Any, cancel_at: int) -> None:
        self.cr_await = awaited  # like a coroutine's attribute, to find the line at which the task waits
        self._inner = awaited.__await__()
        self._cancel_at = cancel_at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        return self._counted(next(self._inner) if value is None else self._inner.send(value))

    def throw(self, *error: Any) -> Any:
        return self._counted(self._inner.throw(*error))

    def _counted(self, waits_for: Any) -> Any:
        self.suspensions += 1
        if self.suspensions == self._cancel_at:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # takes effect at this suspension
        return waits_for


def _ended_within(future: "Future[Outcome]", seconds: float) -> bool:
    try:
        future.result(seconds)
    except WaitTimeoutError:
        return False
    return True
