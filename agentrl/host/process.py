"""Ties a child process to its parent, writes the files by which processes find each other, and measures their CPU.

Guarantees: the kernel sends a child SIGTERM when its parent dies (Linux), so that even ``kill -9`` of the launcher
leaves nothing running; files are written in one step, so that no reader sees a part of one.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to send ``signum`` when the parent dies; exit now if the parent is dead already.

    Args:
        parent_pid: Process id of the expected parent; ``None`` skips the check that it still lives.
        signum: Signal to receive.
    """
    if not tie_to_parent(parent_pid, signum):
        sys.exit(0)


def tie_to_parent(parent_pid: int | None, signum: int = signal.SIGTERM) -> bool:
    """Does the same as :func:`die_with_parent`, but never exits; returns whether the parent still lives."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    return parent_pid is None or os.getppid() == parent_pid


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Write ``data`` to ``path`` in one step, so readers see the old or the new file; ``private`` bars other users."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600 if private else 0o666)
    partial.write_text(json.dumps(data))
    partial.replace(path)


class CpuShare:
    """Share of one core that this process uses, over all its threads, from one call to the next.

    Args:
        cpu: Function that returns the CPU seconds of this process.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self, cpu: Callable[[], float] = time.process_time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu, self._clock = cpu, clock
        self._spent, self._at = cpu(), clock()

    def since_last(self) -> float | None:
        """Returns CPU seconds over seconds since the latest call; ``None`` if no time has passed."""
        spent, at = self._cpu(), self._clock()
        used, passed = spent - self._spent, at - self._at
        self._spent, self._at = spent, at
        return used / passed if passed > 0 else None
