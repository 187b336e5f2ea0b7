"""Event loop with a virtual clock: waiting costs no time.

Guarantees: ``time()`` changes only when nothing is ready to run, and then to the time of the next timer; so the same
program with the same seeds runs the same way each time, however fast the machine is. When nothing is ready and there
is no timer, nothing can ever happen again: :class:`Deadlock` names the waiting tasks. Calls that would run in a thread
(``asyncio.to_thread``, ``run_in_executor``) run in the loop's own thread. There are no sockets and signals.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentrl.core.stack_place import frames_of, place

T = TypeVar("T")
MOST_NAMED = 12  # tasks that a message names


class Deadlock(RuntimeError):
    """Nothing can happen any more, or not before the end of the simulation; the message names the waiting tasks."""


class _NoSelector:
    """Stands where asyncio waits for sockets; it moves the clock instead."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Moves the clock to the next timer; ``timeout`` is 0 while a callback is ready."""
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop whose clock is virtual.

    Args:
        limit: Virtual seconds after which :class:`Deadlock` is raised: something that polls hides that the rest waits.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self._now = 0.0
        self._limit = limit
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-6  # seconds; timers this close to now are due

    def time(self) -> float:
        """Returns the virtual time in seconds, 0 at the start."""
        return self._now

    def jump(self) -> None:
        """Move the clock to the next timer.

        Raises:
            Deadlock: There is no timer, or it is after the limit.
        """
        timers = self._scheduled  # type: ignore[attr-defined] - a heap; cancelled ones are removed before this call
        if not timers:
            raise Deadlock(f"at {self._now:g} s nothing can happen any more: {self._waiting()}")
        when = timers[0].when()
        if when > self._limit:
            self._limit = float("inf")  # what is left can be cancelled in order
            raise Deadlock(f"no end within {when:g} virtual seconds: {self._waiting()}")
        self._now = max(self._now, when)

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        named = [f"{task.get_name()} in {place(frames_of(task))}" for task in tasks if not task.done()]
        more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return "; ".join(named[:MOST_NAMED]) + more if named else "no task is left"

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Call a function in this thread with the next turn of the loop; there are no other threads."""
        return self.create_task(_called(func, *args))

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There is no other thread that could wake the loop."""


async def _called(func: Callable[..., T], *args: Any) -> T:
    return func(*args)


def run_virtual(main: Coroutine[Any, Any, T], *, limit: float = float("inf")) -> T:
    """Run a coroutine under a virtual clock and return its result.

    Args:
        main: Coroutine to run.
        limit: Virtual seconds after which the run counts as stuck.

    Raises:
        Deadlock: It waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit)) as runner:
        return runner.run(main)
