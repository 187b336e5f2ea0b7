"""Detects code that blocks the event loop, and reports its line.

Guarantees: after ``WARN_SECONDS``, the blocking line is printed; after ``limit`` seconds the stack is printed and the
process ends, because a blocked loop can neither end overdue episodes nor answer the trainer. A caller that waits beside
the loop, as a notebook does, gets an error instead.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from agentrl.config.rollout import RolloutConfig
from agentrl.core.stack_place import outer_frames, place
from agentrl.host.event_loop import EventLoop
from agentrl.launch.supervisor import ChildFailed

BEAT_SECONDS = 1.0
WARN_SECONDS = 5.0  # seconds without progress of any episode after which a line is logged
EXIT_CODE = 4
SHORTEST_STANDSTILL = 30.0  # a loop blocked for fewer seconds never ends the run, even if episodes are shorter


class LoopWatch:
    """Watches the event loop of the thread that creates this object.

    Args:
        limit: Seconds of a blocked loop after which the process ends.
        clock: Function that returns monotonic seconds.
        end: Function that ends the process with an exit code.
    """

    def __init__(
        self, limit: float, *, clock: Callable[[], float] = time.monotonic, end: Callable[[int], object] = os._exit
    ) -> None:
        self.limit = limit
        self._clock = clock
        self._end = end
        self._thread = threading.get_ident()
        self._served = clock()
        self._warned = False
        self._stopped = threading.Event()

    @classmethod
    def of(cls, config: RolloutConfig, *, end: Callable[[int], object] = os._exit) -> "LoopWatch":
        """Returns a watch that ends the process when no deadline of a recipe's episodes can be kept."""
        return cls(max(SHORTEST_STANDSTILL, config.episode_timeout), end=end)

    def start(self, loop: asyncio.AbstractEventLoop) -> "LoopWatch":
        """Watch a loop until :meth:`stop`."""

        def watch() -> None:
            while not self._stopped.wait(BEAT_SECONDS):
                loop.call_soon_threadsafe(self.served)
                self.look()

        threading.Thread(target=watch, name="agentrl-loop-watch", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def served(self) -> None:
        """Record that the loop is running."""
        self._served, self._warned = self._clock(), False

    def look(self) -> None:
        """Warn, or end the process, if the loop has been blocked for too long."""
        still = self._clock() - self._served
        if still < WARN_SECONDS or (self._warned and still < self.limit):
            return
        frame = sys._current_frames().get(self._thread)
        where = place(outer_frames(frame))
        advice = "await something else, set blocking = True on the environment's class, or use agentrl.host.worker_pool"
        if still < self.limit:
            self._warned = True
            print(f"all episodes have stood still for {still:.0f} s in {where}: {advice}", file=sys.stderr, flush=True)
            return
        print("".join(traceback.format_stack(frame)), file=sys.stderr)
        print(f"the event loop was blocked for {still:.0f} s in {where}: {advice}", file=sys.stderr, flush=True)
        self.stop()
        self._end(EXIT_CODE)


def leave_or_exit(loop: EventLoop, code: int, *, exit: Callable[[int], object] = os._exit) -> None:
    """Ends a run whose event loop is blocked: with an error for a caller beside the loop, else with the process."""
    if not loop.leave(ChildFailed("the evaluation ended: its event loop was blocked, see the lines printed before")):
        exit(code)
