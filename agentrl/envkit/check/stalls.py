"""Measures how long the event loop was blocked, and by which line.

Guarantees: time counts only while a user's line is on the loop's stack, without imports and without the time that the
thread waited for a CPU (Linux); a busy machine alone causes no stall.
"""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentrl.envkit.check.source_lines import UserLines

STALL_SECONDS = 0.05  # shortest blocking that counts as a stall
TICK_SECONDS = 0.01  # interval between two samples of the loop's stack


@dataclass(frozen=True)
class Stall:
    """A period during which the event loop was blocked.

    Attributes:
        label: The call that was running, such as ``step``.
        where: The user's line seen most often.
        seconds: Duration, without the time spent waiting for a CPU.
    """

    label: str
    where: str
    seconds: float


class StallWatch:
    """A thread that pings an event loop and samples its stack while it does not respond.

    Args:
        loop: The event loop; it is watched after :meth:`watch`.
        thread: Thread of the event loop.
        lines: Finds the user's source lines.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, lines: UserLines) -> None:
        self.stalls: list[Stall] = []
        self._loop, self._thread, self._lines = loop, thread, lines
        self._label = ""
        self._busy, self._ended = threading.Event(), False
        self._watcher = threading.Thread(target=self._run, name="envcheck-watch", daemon=True)
        self._watcher.start()

    def watch(self, label: str) -> None:
        """Watch a call; empty text stops watching."""
        self._label = label
        if label:
            self._busy.set()
        else:
            self._busy.clear()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._busy.set()
        self._watcher.join(1.0)

    def _run(self) -> None:
        while True:
            self._busy.wait()
            if self._ended:
                return
            label, opened = self._label, threading.Event()
            waited, started = self._cpu_wait(), time.perf_counter()
            self._loop.call_soon_threadsafe(opened.set)
            seen = self._look_until(opened.is_set)
            seconds = time.perf_counter() - started - (self._cpu_wait() - waited)
            if seen and seconds > STALL_SECONDS:
                where, count = Counter(seen).most_common(1)[0]
                if where and 2 * count >= len(seen):
                    self.stalls.append(Stall(label, where, seconds))
            time.sleep(TICK_SECONDS)

    def _look_until(self, opened: Callable[[], bool]) -> list[str]:
        """Samples the user's line, empty for none, until the loop responds."""
        seen: list[str] = []
        while not opened() and not self._ended:
            time.sleep(TICK_SECONDS)
            if not opened():
                frame = sys._current_frames().get(self._thread.ident or 0)
                seen.append("" if _imports(frame) else self._lines.of_frame(frame))
        return seen

    def _cpu_wait(self) -> float:
        """Returns how many seconds the loop's thread has waited for a CPU; 0 if the system does not report it."""
        try:
            text = Path(f"/proc/self/task/{self._thread.native_id}/schedstat").read_text()
        except OSError:
            return 0.0
        return int(text.split()[1]) / 1e9


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
