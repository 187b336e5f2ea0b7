"""Bounds a coroutine of user code: it ends in time, is cut, or is abandoned.

Guarantees: :func:`within` returns, or raises the cancellation of its caller, at most ``timeout`` + ``waited()`` +
``close_timeout`` + ``LAST_SECONDS`` after its call, whatever the coroutine does, unless code blocks the event loop. The
coroutine has ``timeout`` to end, and what it waited for others beside it; then it is cancelled and has
``close_timeout`` for its teardown; then it is cancelled once more, which cuts a teardown that hangs; a task that runs
on nevertheless is abandoned (:mod:`agentrl.rollout.abandoned`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl.config.rollout import RolloutConfig
from agentrl.core.stack_place import frames_of, place, written
from agentrl.rollout.abandoned import Abandoned

T = TypeVar("T")
SHORTEST_LOOK = 0.05  # seconds between two looks at how long a coroutine has waited
LAST_SECONDS = 1.0  # after the second cancellation; a teardown that has a shorter limit gets no more than that


@dataclass(frozen=True)
class Limits:
    """Time limits of a coroutine in seconds.

    Attributes:
        timeout: Time to end.
        close_timeout: Time of its teardown, after it was cancelled.
    """

    timeout: float
    close_timeout: float

    @classmethod
    def of(cls, config: RolloutConfig) -> "Limits":
        """Returns the limits of a recipe's episodes."""
        return cls(config.episode_timeout, config.close_timeout)

    @property
    def teardown(self) -> float:
        """Most seconds from its cancellation until it has ended or is abandoned."""
        return self.close_timeout + min(LAST_SECONDS, self.close_timeout)


@dataclass(frozen=True)
class Ended(Generic[T]):
    """How a coroutine ended.

    Attributes:
        job: The coroutine's task; done, unless it was abandoned.
        overdue: Why it counts as a timeout, with the stack that it hung in; empty if it ended in time.
        abandoned: Whether its teardown was given up: cut, or left running.
    """

    job: "asyncio.Task[T]"
    overdue: str = ""
    abandoned: bool = False


async def within(
    limits: Limits,
    work: Coroutine[Any, Any, T],
    left: Abandoned,
    waited: Callable[[], float] = lambda: 0.0,
    late: Callable[[], None] = lambda: None,
) -> Ended[T]:
    """Run ``work`` as a task of its own, and return how it ended.

    Args:
        limits: Time limits.
        work: Coroutine to run.
        left: Takes the task if it has to be abandoned.
        waited: Function that returns the seconds so far that do not count against ``timeout``.
        late: Called when ``timeout`` has passed, before the coroutine is cancelled.
    """
    loop = asyncio.get_running_loop()
    job, end = loop.create_task(work), loop.time() + limits.timeout
    try:
        await _done(job, limits.timeout)
        if job.done() or await _ended_by(job, end, waited):
            return Ended(job)
        frames = frames_of(job)
        stack, why = (
            written(frames),
            f"no end within {limits.timeout:g} s (rollout.episode_timeout), in {place(frames)}",
        )
        late()
        job.cancel()
        stuck = await _torn_down(job, limits)
        if not stuck:
            return Ended(job, f"{stack}\n{why}")
        how = "was cut" if job.done() else "runs on: its task was abandoned"
        return Ended(job, f"{stack}\n{why}; its teardown took over {limits.close_timeout:g} s and {how}, {stuck}", True)
    except asyncio.CancelledError:  # the run ends
        if not job.cancelling():  # else the end of the process cancelled it too; a second time would cut its teardown
            job.cancel()
        await _torn_down(job, limits)
        raise
    finally:
        if not job.done():
            left.add(job)


async def _ended_by(job: "asyncio.Task[Any]", end: float, waited: Callable[[], float]) -> bool:
    """Waits until a task is done, at most until ``end`` and as long as it waited; returns whether it is done."""
    now = asyncio.get_running_loop().time
    while not job.done() and (left := end + waited() - now()) > 0.001:
        await _done(job, max(left, SHORTEST_LOOK))
    return job.done()


async def _done(job: "asyncio.Task[Any]", seconds: float) -> None:
    """Waits up to ``seconds`` until a task is done; ``asyncio.wait`` for one task, in half the time."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(seconds, wake)
    job.add_done_callback(wake)
    try:
        await woken
    finally:
        timer.cancel()
        job.remove_done_callback(wake)


async def _torn_down(job: "asyncio.Task[Any]", limits: Limits) -> str:
    """Waits for the teardown of a cancelled task; returns the place where that hung, empty if it ended in time."""
    await _done(job, limits.close_timeout)
    if job.done():
        return ""
    where = f"in {place(frames_of(job))} (rollout.close_timeout)"
    job.cancel()
    await _done(job, limits.teardown - limits.close_timeout)
    return where
