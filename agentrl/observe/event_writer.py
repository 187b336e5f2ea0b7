"""Writes TensorBoard events in a thread of its own: a record of 120 metrics takes tens of milliseconds of Python.

Guarantees: :meth:`EventWriter.add` only queues; events are written in order, and :meth:`EventWriter.close` writes what
is queued. The queue is bounded: a disk that stands still is waited for after :data:`QUEUED` records. A failure of the
thread is raised by the next call.
"""

import math
import queue
import threading
from collections.abc import Mapping
from typing import Any

QUEUED = 1000  # records
CLOSE_SECONDS = 30.0  # for the queued records at the end of a run
Record = tuple[int, dict[str, float], float]


class EventWriter:
    """Queues records for a TensorBoard writer.

    Args:
        events: A ``SummaryWriter``, which the thread alone uses.
    """

    def __init__(self, events: Any) -> None:
        self._events = events
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUED)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Queue a record; ``now`` is its time, in seconds since the epoch.

        Raises:
            OSError: An earlier record could not be written.
        """
        self._raise()
        self._queue.put((step, dict(metrics), now))

    def close(self) -> None:
        """Write what is queued, and close the files.

        Raises:
            OSError: A record could not be written, or the disk does not take them in time.
        """
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._raise()
        if self._thread.is_alive():
            raise OSError(f"TensorBoard's events were not written within {CLOSE_SECONDS:g} s")

    def _raise(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            step, metrics, now = record
            try:
                for name, value in metrics.items():
                    if math.isfinite(value):
                        self._events.add_scalar(name, value, step, walltime=now)
            except (OSError, ValueError) as error:
                self._failure = error
        self._events.close()
