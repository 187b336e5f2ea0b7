"""TensorBoard events are written beside the caller, in order, to the last one, and end no run."""

import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.event_writer import EventWriter

pytest.importorskip("tensorboardX")
SECONDS = 60  # longest wait for anything; a test that needs it has failed


class Events:
    """A file that waits until it is let."""

    def __init__(self) -> None:
        self.let, self.written, self.closed = threading.Event(), [], False
        self.flushed = 0
        self.error: Exception | None = None

    def write_event(self, event: Any) -> None:
        assert self.let.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.written.append((event.step, event.wall_time, {one.tag: one.simple_value for one in event.summary.value}))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def events() -> Events:
    return Events()


def test_a_slow_disk_keeps_nobody_and_loses_nothing(events: Events, tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, lambda prefix: events)
    for step in range(3):
        writer.add(step, {"a": step / 2, "bad": float("nan")}, 10.0 + step)
    assert events.written == [], "three records are taken while none is written"
    events.let.set()
    writer.close()
    assert events.written == [(step, 10.0 + step, {"a": step / 2}) for step in range(3)] and events.closed


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("No space left for a step")])
def test_a_file_that_cannot_be_written_is_said_once_and_ends_no_run(
    events: Events, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    events.error = error
    events.let.set()
    writer = EventWriter(tmp_path, lambda prefix: events)
    for step in range(3):
        writer.add(step, {"a": 1.0}, 10.0)
    writer.close()
    assert caplog.text.count("No space left") == 1 and events.written == []


def test_a_disk_that_stands_still_is_not_waited_for_at_the_end(
    events: Events, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = EventWriter(tmp_path, lambda prefix: events)
    writer.add(0, {"a": 1.0}, 10.0)
    writer.close(0.01)
    assert "tensorboard: 300 bytes were not written within 0.01 s" in caplog.text
    events.let.set()


def test_events_are_put_on_the_disk_from_time_to_time(events: Events, tmp_path: Path) -> None:
    events.let.set()
    times = iter([0.0, 29.0, 31.0, 31.0, 40.0])
    writer = EventWriter(tmp_path, lambda prefix: events, clock=lambda: next(times))
    for step in range(3):
        writer.add(step, {"a": 1.0}, 10.0)
        writer._thread.flush()
    assert events.flushed == 1
    writer.close()


def test_every_number_stands_in_the_file(tmp_path: Path) -> None:
    """Read by the format's description: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    writer = EventWriter(tmp_path)
    for step in range(500):
        writer.add(step, {"reward/mean": step / 2, "time/step": 1.0}, 10.0 + step)
    writer.close()
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert found[0].file_version == "brain.Event:2"
    assert [(one.step, one.wall_time, one.summary.value[0].simple_value) for one in found[1:]] == [
        (step, 10.0 + step, step / 2) for step in range(500)
    ]
    assert {tuple(value.tag for value in one.summary.value) for one in found[1:]} == {("reward/mean", "time/step")}
