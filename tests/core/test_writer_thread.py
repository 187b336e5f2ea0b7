"""Files that a thread writes: order, bound, failures."""

import logging
import threading
from collections.abc import Sequence

import pytest

from agentrl.core.writer_thread import WriterThread

SECONDS = 60  # longest wait for anything; a test that needs it has failed


class Disk:
    """Takes lines once it is let."""

    def __init__(self) -> None:
        self.let, self.asked, self.wrote = threading.Event(), threading.Event(), threading.Event()
        self.calls: list[list[str]] = []

    def first(self, lines: Sequence[str]) -> None:
        self._take("first", lines)

    def second(self, lines: Sequence[str]) -> None:
        self._take("second", lines)

    def _take(self, name: str, lines: Sequence[str]) -> None:
        self.asked.set()
        assert self.let.wait(SECONDS)
        self.calls.append([name, *lines])
        self.wrote.set()


def test_what_waits_is_written_in_order_and_that_of_one_target_together() -> None:
    disk, writer = Disk(), WriterThread("logs")
    writer.add(disk.first, "0")
    assert disk.asked.wait(SECONDS)  # the thread stands in the first call
    for target, line in ((disk.first, "1"), (disk.first, "2"), (disk.second, "a"), (disk.first, "3")):
        assert writer.add(target, line)
    assert disk.calls == []
    disk.let.set()
    writer.flush(SECONDS)
    assert disk.calls == [["first", "0"], ["first", "1", "2"], ["second", "a"], ["first", "3"]]
    writer.close()


def test_a_flush_waits_for_what_was_added_before_and_no_longer_than_asked(caplog: pytest.LogCaptureFixture) -> None:
    disk, writer = Disk(), WriterThread("logs")
    writer.flush(SECONDS)  # nothing was added
    writer.add(disk.first, "0", 7)
    with pytest.raises(TimeoutError, match=r"7 bytes were not written within 0.01 s"):
        writer.flush(0.01)
    writer.close(0.01)
    assert caplog.messages == ["logs: 7 bytes were not written within 0.01 s"]
    disk.let.set()
    assert disk.wrote.wait(SECONDS)
    assert disk.calls == [["first", "0"]]
    writer.close()


def test_lines_are_left_out_while_too_much_waits_and_what_counts_for_nothing_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, writer = Disk(), WriterThread("logs", most=100)
    with caplog.at_level(logging.WARNING):
        assert writer.add(disk.first, "0", 60) and writer.add(disk.first, "1", 60)
        assert not writer.add(disk.first, "2", 60) and not writer.add(disk.first, "3", 1)
        assert writer.add(disk.second, "a")
        disk.let.set()
        writer.flush(SECONDS)
        assert writer.add(disk.first, "4", 60), "there is room again"
        writer.close()
    assert [line for _, *lines in disk.calls for line in lines] == ["0", "1", "a", "4"]
    assert [record.getMessage() for record in caplog.records] == [
        "the disk does not keep up: 120 bytes wait, and lines are left out",
        "2 lines were left out, for which the disk was too slow",
    ]


def test_an_exception_of_a_target_is_raised_by_the_next_call_and_later_lines_are_written() -> None:
    disk, writer = Disk(), WriterThread("logs")
    disk.let.set()

    def broken(lines: Sequence[str]) -> None:
        raise ValueError(f"cannot write {lines}")

    writer.add(broken, "0")
    with pytest.raises(ValueError, match="cannot write"):
        writer.flush(SECONDS)
    writer.add(disk.first, "1")
    writer.add(broken, "2")
    with pytest.raises(ValueError, match="cannot write"):
        writer.close()
    assert disk.calls == [["first", "1"]]
