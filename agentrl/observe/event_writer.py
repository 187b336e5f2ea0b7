"""Writes TensorBoard events in a thread of its own: a record of 120 metrics takes tens of milliseconds of Python.

Guarantees: those of :class:`~agentrl.core.writer_thread.WriterThread`; a failure is raised by the next call.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.writer_thread import WriterThread

BYTES = 300  # of a queued metric, about
Record = tuple[int, dict[str, float], float]


class EventWriter:
    """Queues records for a TensorBoard writer.

    Args:
        events: A ``SummaryWriter``, which the thread alone uses.
    """

    def __init__(self, events: Any) -> None:
        self._events = events
        self._thread = WriterThread("tensorboard")

    def add(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Queue a record; ``now`` is its time, in seconds since the epoch.

        Raises:
            OSError: An earlier record could not be written.
        """
        self._thread.add(self._write, (step, dict(metrics), now), BYTES * len(metrics))

    def close(self) -> None:
        """Write what is queued, and close the files.

        Raises:
            OSError: A record could not be written, or the disk does not take them in time.
        """
        self._thread.close()
        self._events.close()

    def _write(self, records: Sequence[Record]) -> None:
        for step, metrics, now in records:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._events.add_scalar(name, value, step, walltime=now)
