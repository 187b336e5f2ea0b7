"""Asks a run's controller for its state, for what the terminal shows, in a thread of its own.

Guarantees: the run and its view never wait for an answer; an answer that is old says nothing any more.
"""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.config.errors import UserError
from agentrl.launch.run_folders import CONTROLLER, live_status

EVERY_SECONDS = 2.0
OLD_SECONDS = 15.0


class LiveWatch:
    """Keeps the newest state of a run.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._latest: tuple[float, dict[str, Any]] = (0.0, {})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="live watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()  # a call that still waits ends with its own limit

    def latest(self) -> dict[str, Any]:
        """Returns the newest state; empty without one, or if it is old."""
        at, found = self._latest
        return found if time.monotonic() - at < OLD_SECONDS else {}

    def _work(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            if not (self._run_dir / CONTROLLER).is_file():
                continue
            try:
                self._latest = time.monotonic(), live_status(self._run_dir)
            except (UserError, OSError, ValueError, KeyError):
                continue  # it starts or ends
