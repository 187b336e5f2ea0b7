"""SIGUSR1 to a run's launcher: the trainer finishes its step, saves a checkpoint, and the run ends to be continued.

Guarantees: the trainer alone decides when, between two steps; a run that ends by itself meanwhile ends as usual.
"""

import signal
from pathlib import Path
from types import FrameType

from agentrl.host.stop_signals import Handlers
from agentrl.train.checkpoint_state import SAVED_FILE, STOP_FILE

SAVED_CODE = 75  # EX_TEMPFAIL: run it again


class SavedAndStopped(Exception):
    """The trainer has saved its checkpoint after the request to stop."""


def on_request(run_dir: Path) -> Handlers:
    """Returns the handler of SIGUSR1, which asks the trainer of a run to save and stop."""

    def ask(signum: int, frame: FrameType | None) -> None:
        if (run_dir / "processes").is_dir():
            (run_dir / "processes" / STOP_FILE).touch()

    return {signal.SIGUSR1: ask}


def check_saved(run_dir: Path) -> None:
    """Does nothing while the trainer trains.

    Raises:
        SavedAndStopped: It has saved and stopped, as it was asked to.
    """
    if (run_dir / "processes" / SAVED_FILE).exists():
        raise SavedAndStopped
