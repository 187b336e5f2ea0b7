"""Writes and reads metrics: one JSON line per record, and TensorBoard events.

Guarantees: a record is in the JSON file when its writer has written it (:mod:`agentrl.core.writer_thread`; without one
once ``write`` returns), or waits for room on a full disk, said once; none is left out. TensorBoard's events are always
written beside the caller. A line that a killed process left incomplete is dropped when the
file is opened again; a number that is not finite is written as null, which JSON cannot express otherwise.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.whole_lines import drop_cut_line
from agentrl.core.writer_thread import AtOnce, Writer
from agentrl.observe.event_writer import EventWriter

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends the metrics of a run to its files.

    Args:
        run_dir: Folder of the run; created when missing.
        tensorboard: Whether to also write TensorBoard events, under ``tensorboard/``.
        clock: Returns seconds since the epoch, for the ``time`` of a record.
        writer: Writes the JSON lines, of which it has none left when the file is closed.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is true and tensorboardX is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        clock: Callable[[], float] = time.time,
        writer: Writer | None = None,
    ) -> None:
        self._writer = writer or AtOnce()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._path = run_dir / METRICS_FILE
        self._file = self._path.open("ab", buffering=0)
        drop_cut_line(self._path)
        self._waiting = b""  # lines that the disk had no room for
        self._events = EventWriter(run_dir / EVENTS_FOLDER) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one record.

        Args:
            step: Trainer step; the evaluation at a step may be a separate record.
            metrics: Maps metric names to numbers.
        """
        now = self._clock()
        self._writer.add(self._put, orjson.dumps({"step": step, "time": now, **metrics}) + b"\n")
        if self._events is not None:
            self._events.add(step, metrics, now)

    def _put(self, lines: Sequence[bytes]) -> None:
        waited, self._waiting = bool(self._waiting), self._waiting + b"".join(lines)
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as error:
            if not waited:
                log.warning("%s cannot be written now: %s", self._path, error)

    def void_after(self, step: int, asked: int | None = None) -> bool:
        """Drop the records of later steps, because a run that resumes at ``step`` repeats them.

        Returns:
            Whether there is a record of the step ``asked``; of ``step`` itself by default.
        """
        self._file.close()
        lines = self._path.read_bytes().splitlines(keepends=True)
        steps = [None if (record := _record(line)) is None else record["step"] for line in lines]
        kept = [line for line, of in zip(lines, steps, strict=True) if of is not None and of <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(b"".join(kept))
        partial.replace(self._path)
        self._file = self._path.open("ab", buffering=0)
        return (step if asked is None else asked) in steps

    def close(self) -> None:
        """Flush and close the files; may be called twice. What a full disk refused is written if there is room now."""
        if not self._file.closed:
            self._put([])
            if self._waiting:
                log.error("%s lacks its last %d bytes, for which the disk had no room", self._path, len(self._waiting))
            self._file.close()
        if self._events is not None:
            events, self._events = self._events, None
            events.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Reads a metrics file as one record per step, in order; later values of the same step replace earlier ones.

    Args:
        path: ``metrics.jsonl`` of a run. A last line that is still being written is left out, and so is one that is
            damaged, which the log says.

    Returns:
        Records with ``step``, ``time`` and the finite numbers of that step.
    """
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        record = _record(line)
        if record is None:
            log.warning("%s, line %d is damaged: it is left out", path, number)
            continue
        step = record["step"]
        finite = {name: value for name, value in record.items() if value is not None and math.isfinite(value)}
        steps.setdefault(int(step), {}).update(finite)
    return [steps[step] for step in sorted(steps)]


class MetricsTail:
    """Follows a metrics file that a run is writing.

    A run that resumes replaces the file by one without the steps that it repeats (:meth:`MetricsWriter.void_after`):
    the records that both have are not given twice.

    Args:
        path: ``metrics.jsonl`` of a run; it may not exist yet.
        skip: Whether records that are in it already are skipped.
    """

    def __init__(self, path: Path, *, skip: bool = True) -> None:
        self._path = path
        self._file = self._offset = 0  # its number, and the end of what was read
        self._seen: set[bytes] = set()  # digests of the lines
        if skip:
            for _ in self._lines():
                pass

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the records that were completed since the last call; a line that is none is left out, and said."""
        for line in self._lines():
            record = _record(line)
            if record is None:
                log.warning("%s has a damaged line before byte %d", self._path, self._offset)
            else:
                yield record

    def _lines(self) -> Iterator[bytes]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._file or state.st_size < self._offset:
                self._file, self._offset = state.st_ino, 0
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset = file.tell()
                digest = hashlib.blake2b(line, digest_size=8).digest()
                if digest not in self._seen:
                    self._seen.add(digest)
                    yield line


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; ``None`` if it is damaged: a power failure leaves zeros in a file, say."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int | float) else None
