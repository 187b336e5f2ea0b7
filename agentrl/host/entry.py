"""Start of a process's entry point: its arguments, and the signals that end it.

Guarantees: SIGTERM ends the process at once through its ``finally`` clauses, with the shell's code for it; so does the
end of the process that started it, even by ``kill -9`` (Linux).
"""

import argparse
import signal
from pathlib import Path
from types import FrameType

from agentrl.host.process import die_with_parent

STOPPED = 128 + signal.SIGTERM  # the shell's code for a process ended by it


def run_arguments(prog: str) -> argparse.ArgumentParser:
    """Makes a parser with the arguments that every process of a run gets; the caller adds its own.

    Args:
        prog: The module's name, for messages.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--run-dir", type=Path, required=True, help="runs/<name>, with the run's config.json")
    parser.add_argument("--model", type=Path, required=True, help="folder of the starting policy")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    return parser


def begin(parent_pid: int | None = None) -> None:
    """End with SIGTERM and with the parent from now on.

    Args:
        parent_pid: See :func:`~agentrl.host.process.die_with_parent`.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, _exit)


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
