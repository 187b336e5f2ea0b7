"""Ties a child process to its parent, and writes the files by which processes find each other.

Guarantees: a child whose parent dies is sent SIGTERM by the kernel (Linux), so that even ``kill -9`` of the launcher
leaves nothing running; files that announce something appear whole.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None, signum: int = signal.SIGTERM) -> None:
    """Ask the kernel for ``signum`` when the parent dies; exit now if it is gone already.

    Args:
        parent_pid: The parent, where the caller knows it; ``None`` trusts ``os.getppid()``.
        signum: Signal to receive.
    """
    if not tie_to_parent(parent_pid, signum):
        sys.exit(0)


def tie_to_parent(parent_pid: int | None, signum: int = signal.SIGTERM) -> bool:
    """As :func:`die_with_parent`, but says whether the parent still lives instead of exiting."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)
    return parent_pid is None or os.getppid() == parent_pid


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Write ``data`` to ``path`` in one step: readers see the old file or the new one; ``private`` bars other users."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600 if private else 0o666)
    partial.write_text(json.dumps(data))
    partial.replace(path)
