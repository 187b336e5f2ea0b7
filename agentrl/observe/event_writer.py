"""Writes TensorBoard events in a thread of its own: the checksums of 120 metrics take milliseconds of Python.

Guarantees: :meth:`EventWriter.add` only queues. No run waits for its events, or ends by them: a file that cannot be
written is said once, and gets no further events; what a disk does not take within ``CLOSE_SECONDS`` of the end is left
out, and said.

Only tensorboardX's file format is used, not its ``SummaryWriter``, which passes each number through a
``multiprocessing.Queue`` to a thread: ten events were lost in one (30 November 2026, Python 3.11), every later one
waited for their places, and so did its exit handler, for ever.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.core.extras import install_hint
from agentrl.core.writer_thread import WriterThread

log = logging.getLogger(__name__)
BYTES = 300  # of a queued metric, about
FLUSH_SECONDS = 30.0  # between two calls that put what is written on the disk
CLOSE_SECONDS = 30.0
Record = tuple[int, dict[str, float], float]


class EventFile(Protocol):
    """Interface of a file of events, that of tensorboardX's ``EventsWriter``."""

    def write_event(self, event: Any) -> object:
        """Append an event."""

    def flush(self) -> object:
        """Put what is written on the disk."""

    def close(self) -> object:
        """Flush, and close the file."""


class EventWriter:
    """Queues records for a file of events.

    Args:
        folder: Folder of the file; created when missing.
        open_file: Opens the file of a prefix.
        clock: Returns seconds, for the time between two flushes.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    def __init__(
        self,
        folder: Path,
        open_file: Callable[[str], EventFile] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoard events need tensorboardX: {install_hint('train')}, or set logging.tensorboard=false",
                name=error.name,
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # type: ignore[attr-defined]  # made by protobuf
        self._clock = clock
        self._flushed = clock()
        self._file: EventFile | None = (open_file or EventsWriter)(str(folder / "events"))
        self._folder = folder
        self._thread = WriterThread("tensorboard")

    def add(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Queue a record; ``now`` is its time, in seconds since the epoch."""
        self._thread.add(self._write, (step, dict(metrics), now), BYTES * len(metrics))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is queued within ``seconds``, and close the file."""
        self._thread.add(self._close, None)
        self._thread.close(seconds)

    def _write(self, records: Sequence[Record]) -> None:
        if self._file is None:
            return
        try:
            for step, metrics, now in records:
                values = [
                    self._summary.Value(tag=name, simple_value=value)
                    for name, value in metrics.items()
                    if math.isfinite(value)
                ]
                self._file.write_event(self._event(step=step, wall_time=now, summary=self._summary(value=values)))
            if self._clock() - self._flushed >= FLUSH_SECONDS:
                self._flushed = self._clock()
                self._file.flush()
        except (OSError, ValueError) as error:  # half an event may stand in the file, behind which nothing is read
            self._give_up(error)

    def _close(self, _: Sequence[None]) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self._file = None
        log.warning("%s cannot be written, and gets no further events: %s", self._folder, error)
