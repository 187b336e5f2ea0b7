"""TensorBoard events are written beside the caller, in order, to the last one."""

import threading

import pytest

from agentrl.observe.event_writer import EventWriter

SECONDS = 60  # longest wait for anything; a test that needs it has failed


class Events:
    """A writer that waits until it is let."""

    def __init__(self) -> None:
        self.let, self.written, self.closed = threading.Event(), [], False
        self.error: Exception | None = None

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        assert self.let.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.written.append((name, value, step, walltime))

    def close(self) -> None:
        self.closed = True


def test_a_slow_disk_keeps_nobody_and_loses_nothing() -> None:
    events = Events()
    writer = EventWriter(events)
    for step in range(3):
        writer.add(step, {"a": step / 2, "bad": float("nan")}, 10.0 + step)
    assert events.written == [], "three records are taken while none is written"
    events.let.set()
    writer.close()
    assert events.written == [("a", step / 2, step, 10.0 + step) for step in range(3)] and events.closed


def test_a_record_that_cannot_be_written_is_told_by_the_next_call() -> None:
    events = Events()
    events.error = OSError(28, "No space left on device")
    events.let.set()
    writer = EventWriter(events)
    writer.add(0, {"a": 1.0}, 10.0)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
