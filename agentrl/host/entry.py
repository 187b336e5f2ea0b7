"""Common start and end of entry points: arguments, the signals that end a process, and how it refuses what was asked.

Guarantees: a refusal is one line of the log, and has an exit code of its own. SIGTERM ends the process at once, runs
its ``finally`` clauses, and gives the shell's exit code for SIGTERM; the end of the parent process, even by
``kill -9``, has the same effect (Linux).
"""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from agentrl.host.process import die_with_parent

STOPPED = 128 + signal.SIGTERM  # the shell's exit code for a process ended by SIGTERM
REFUSED = 78  # EX_CONFIG of sysexits.h: what the user asked for cannot be done
_REFUSAL = "refused: "


def run_arguments(prog: str) -> argparse.ArgumentParser:
    """Makes a parser with the arguments that every process of a run gets; the caller adds its own.

    Args:
        prog: Name of the module, for messages.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--run-dir", type=Path, required=True, help="runs/<name>, with the run's config.json")
    parser.add_argument("--model", type=Path, required=True, help="folder of the starting policy")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    return parser


def begin(parent_pid: int | None = None) -> None:
    """Make this process end on SIGTERM and when its parent ends.

    Args:
        parent_pid: Process id of the parent, see :func:`~agentrl.host.process.die_with_parent`.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, _exit)


def refuse(error: Exception) -> int:
    """Prints an error of the user as one line, and returns the exit code that says so to the launcher."""
    print(_REFUSAL + " ".join(str(error).splitlines()), file=sys.stderr, flush=True)
    return REFUSED


def refusal_in(log: str) -> str:
    """Returns the error that a process printed before it ended with :data:`REFUSED`; empty if there is none."""
    lines = [line for line in log.splitlines() if line.startswith(_REFUSAL)]
    return lines[-1].removeprefix(_REFUSAL) if lines else ""


def _exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
