"""Runs the process that sends a run's metrics to its trackers, beside the run.

Guarantees: it starts with the run and gets :data:`SECONDS` for the rest when the run ends; a failure of it is said, and
changes nothing of the run.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60.0  # for what is not sent yet at the end
LOG = Path("logs") / "trackers.log"


@contextmanager
def tracked(names: Sequence[str], run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Sends what a run writes to trackers, while the block runs.

    Args:
        names: ``logging.trackers``; with none, nothing is started.
        run_dir: Folder of the run.
        say: Called with a sentence when the trackers did not get everything.
    """
    if not names:
        yield
        return
    (run_dir / LOG).parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "agentrl.observe.track_run", str(os.getpid()), str(run_dir), ",".join(names)]
    with (run_dir / LOG).open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        problem = _ended(process)
        if problem:
            say(f"trackers {', '.join(names)}: {problem}; see {run_dir / LOG}")


def _ended(process: "subprocess.Popen[bytes]") -> str:
    """Ends the process; returns what went wrong, or nothing."""
    if process.poll() is None:
        process.terminate()
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"not all was sent within {SECONDS:.0f} s"
    return f"the process that sends ended with code {code}" if code else ""
