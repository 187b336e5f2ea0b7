"""The journal: its checksums, its proof, a resume, a full disk."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from agentrl.core.whole_lines import WholeLines
from agentrl.core.writer_thread import WriterThread
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.rollout.journal_lines import FILE, JournalError, OlderFormat, Position
from agentrl.rollout.journal_proof import Violation, prove, prove_records, valid_outcomes


def test_a_resume_voids_the_groups_of_the_steps_that_it_repeats_whatever_became_of_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path, episodes=False)
    for draw, task in enumerate("abcdefg"):
        journal.admitted(draw=draw, task=task, seed=draw, version=0)
    journal.group("trained", draw=0, task="a", step=0)
    journal.group("filtered", draw=1, task="b", step=1, reason="uniform rewards")
    journal.group("trained", draw=2, task="c", step=1)
    cut = asyncio.run(journal.cut(2))
    journal.group("failed", draw=3, task="d", step=2, reason="0 of 2 episodes usable")  # after the checkpoint
    journal.group("filtered", draw=4, task="e", step=2, reason="uniform rewards")
    journal.group("trained", draw=5, task="f", step=2)
    journal.group("cancelled", draw=6, task="g", step=3, reason="end of the run")
    journal.resumed(2, cut, again=[3, 4, 5, 6], held=[])
    journal.admitted(draw=3, task="d", seed=3, version=2)
    journal.group("trained", draw=3, task="d", step=2)
    journal.close()
    assert [(r["draw"], r["outcome"], r["step"]) for r in valid_outcomes(tmp_path)] == [
        (0, "trained", 0),
        (1, "filtered", 1),
        (2, "trained", 1),
        (3, "trained", 2),
    ]


def written(folder: Path, groups: int = 3) -> bytes:
    """A journal of some trained groups and a cut."""
    journal = Journal(folder, episodes=False)
    for draw in range(groups):
        journal.admitted(draw=draw, task=f"t{draw}", seed=draw, version=0)
        journal.group("trained", draw=draw, task=f"t{draw}", step=draw)
    asyncio.run(journal.cut(groups))
    journal.close()
    return (folder / FILE).read_bytes()


def test_a_last_line_that_was_cut_is_no_error_and_is_removed_when_the_journal_goes_on(tmp_path: Path) -> None:
    whole = written(tmp_path)
    for missing in (1, 10, 40):
        (tmp_path / FILE).write_bytes(whole[:-missing])
        assert prove(tmp_path).lines == 6
        journal = Journal(tmp_path, episodes=False)
        journal.admitted(draw=3, task="t3", seed=3, version=0)
        journal.close()
        assert prove(tmp_path).lines == 7 and (tmp_path / FILE).read_bytes().startswith(whole[: whole.rfind(b"{")])


@pytest.mark.parametrize("change", ["bit", "removed", "repeated", "swapped"])
def test_a_line_that_was_changed_removed_repeated_or_moved_is_an_error_that_names_it(
    tmp_path: Path, change: str
) -> None:
    lines = written(tmp_path).splitlines(keepends=True)
    if change == "bit":
        lines[2] = lines[2].replace(b'"draw":1', b'"draw":2')
    elif change == "removed":
        del lines[2]
    elif change == "repeated":
        lines.insert(2, lines[1])
    else:
        lines[2:4] = lines[3], lines[2]
    (tmp_path / FILE).write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match=r"journal\.jsonl, line 3: wrong checksum"):
        prove(tmp_path)
    with pytest.raises(JournalError, match="line 3"):
        Journal(tmp_path, episodes=False).own(0.0)


def test_a_journal_of_an_older_format_is_called_so_and_not_damaged(tmp_path: Path) -> None:
    lines = [{"outcome": "trained", "draw": draw, "task": "a", "step": 0, "reason": None} for draw in range(2)]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for read in (lambda: prove(tmp_path), lambda: Journal(tmp_path, episodes=False).own(0.0)):
        with pytest.raises(OlderFormat, match="is of an older format, whose lines have no checksums"):
            read()
    assert not issubclass(OlderFormat, JournalError), "agentrl runs check says violation for those"
    (tmp_path / "new").mkdir()
    whole = written(tmp_path / "new")
    (tmp_path / "new" / FILE).write_bytes(whole.replace(b'"draw":0', b'"draw":1', 1))
    with pytest.raises(JournalError, match="line 1: wrong checksum"):
        prove(tmp_path / "new")


def test_a_journal_that_lacks_the_cut_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path, episodes=False)
    for position in (Position(9, 1), Position(7, 1)):
        with pytest.raises(JournalError, match=r"does not belong to the checkpoint after step 3.*has 7 lines"):
            journal.resumed(3, position, again=[], held=[])
    journal.close()


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, episodes=False), Journal(tmp_path, episodes=False)
    first.own(0.0)
    with pytest.raises(JournalError, match="another process writes"):
        second.own(0.0)
    first.close()
    second.own(0.0)
    second.close()


def admitted(draw: int, **more: Any) -> dict[str, Any]:
    return {"outcome": "admitted", "draw": draw, "task": f"t{draw}", "seed": draw, "version": 0, **more}


def ended(draw: int, step: int, outcome: str = "trained") -> dict[str, Any]:
    return {"outcome": outcome, "draw": draw, "task": f"t{draw}", "step": step}


def resumed(step: int, line: int, again: list[int], held: list[int]) -> dict[str, Any]:
    return {"outcome": "resumed", "step": step, "line": line, "again": again, "held": held}


CUT = {"outcome": "checkpoint", "step": 1}
BEGUN = [admitted(0), admitted(1), admitted(2), ended(0, 0), CUT]  # 1 is finished at the cut, 2 runs
WRONG = {
    "twice in one go": ([admitted(0), ended(0, 0), ended(0, 1)], "line 3: draw 0 ended as trained; line 2 says"),
    "filtered, then trained": ([admitted(0), ended(0, 0, "filtered"), ended(0, 0)], "line 2 says filtered already"),
    "never admitted": ([ended(0, 0)], "line 1: draw 0 ended as trained and was not admitted"),
    "admitted twice": ([admitted(0), admitted(0)], "line 2: draw 0 is admitted, and line 1 did that"),
    "left out": ([admitted(0), admitted(2)], "draw 1 was never admitted, although later ones were"),
    "a step is missing": ([admitted(0), admitted(1), ended(0, 0), ended(1, 2)], "draw 1 is trained in step 2, after 1"),
    "trained again after a resume": ([*BEGUN, resumed(1, 5, [0, 2], [1])], "draw 0 goes on, but line 4 says trained"),
    "held although trained": ([*BEGUN, resumed(1, 5, [2], [0, 1])], "draw 0 goes on, but line 4 says trained"),
    "trained before and after": ([*BEGUN, resumed(1, 5, [2], [1]), ended(0, 1)], "draw 0 ended as trained; line 4"),
    "lost by a resume": ([*BEGUN, resumed(1, 5, [2], [])], "draw 1 was admitted before line 5 and does not go on"),
    "resumed from no checkpoint": ([*BEGUN, resumed(1, 4, [], [])], "line 6: a resume after step 1 from line 4"),
    "another task": ([*BEGUN, resumed(1, 5, [2], [1]), admitted(2, task="x")], "draw 2 is admitted again with another"),
    "another seed": ([*BEGUN, resumed(1, 5, [2], [1]), admitted(2, seed=9)], "draw 2 is admitted again with another"),
    "unknown draw": ([*BEGUN, resumed(1, 5, [2, 7], [1])], "draw 7 goes on, but was not admitted before line 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_violation_is_named(name: str) -> None:
    records, message = WRONG[name]
    with pytest.raises(Violation, match=message):
        prove_records(records)


def test_a_resume_leaves_each_draw_one_end() -> None:
    lost = [ended(1, 1), admitted(3), ended(2, 1, "failed")]
    proof = prove_records(
        [*BEGUN, *lost, resumed(1, 5, [2], [1]), ended(1, 1), admitted(2), ended(2, 2), admitted(3), CUT | {"step": 3}]
    )
    assert proof.outcomes == {"trained": 3} and proof.running == [3] and proof.steps == 3
    assert proof.void == 4 and proof.resumes == 1  # what was lost, and the first admission of draw 2


def test_what_a_full_disk_refused_is_written_when_there_is_room_and_no_cut_is_made_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, episodes=False)
    journal.admitted(draw=0, task="t0", seed=0, version=0)
    file = FullDisk(journal._file)  # type: ignore[arg-type]
    journal._file = file  # type: ignore[assignment]
    file.room = 20
    journal.group("trained", draw=0, task="t0", step=0)
    journal.admitted(draw=1, task="t1", seed=1, version=0)
    with pytest.raises(RolloutError, match="the disk is full"):
        asyncio.run(journal.cut(1))
    assert prove(tmp_path).lines == 1, "a begun line is no line"
    file.room = 10_000
    assert asyncio.run(journal.cut(1)).lines == 5
    journal.close()
    proof = prove(tmp_path)
    assert proof.lines == 5 and proof.steps == 1
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("room", [10_000, 0])
def test_what_waits_for_room_at_the_end_is_written_or_its_loss_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    journal = Journal(tmp_path, episodes=False)
    journal.admitted(draw=0, task="t0", seed=0, version=0)
    file = FullDisk(journal._file)  # type: ignore[arg-type]
    journal._file = file  # type: ignore[assignment]
    journal.group("trained", draw=0, task="t0", step=0)
    file.room = room
    journal.close()
    assert prove(tmp_path).lines == (2 if room else 1)
    assert ("lacks its last" in caplog.text) is not bool(room)


async def test_a_disk_that_takes_its_time_keeps_only_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, seen, whole = threading.Event(), list[int](), os.fsync

    def slow(file: int) -> None:
        assert written.wait(60), "the loop stood still while the disk was waited for"
        whole(file)
        seen.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", slow)
    journal = Journal(tmp_path, episodes=False)
    journal.admitted(draw=0, task="t0", seed=0, version=0)
    cutting = asyncio.create_task(journal.cut(1))
    await asyncio.sleep(0)
    journal.admitted(draw=1, task="t1", seed=1, version=0)
    journal.close()
    assert not cutting.done()
    written.set()
    assert (await cutting).lines == 2, "the position is that of the cut"
    assert seen == [(tmp_path / FILE).stat().st_size]


def test_episodes_that_a_full_disk_refuses_are_left_out_whole_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = WholeLines(tmp_path / "episodes.jsonl")
    assert lines.add(b'{"a":1}\n')
    file = FullDisk(lines._file)  # type: ignore[arg-type]
    lines._file = file  # type: ignore[assignment]
    file.room = 5
    assert not lines.add(b'{"b":2}\n') and not lines.add(b'{"c":3}\n')
    file.room = 100
    assert lines.add(b'{"d":4}\n')
    lines.close()
    assert (tmp_path / "episodes.jsonl").read_bytes() == b'{"a":1}\n{"d":4}\n'
    assert ["lines are left out" in r.message for r in caplog.records] == [True, False]
    assert "lacks 2 lines" in caplog.records[-1].message


def test_an_episode_that_was_cut_is_removed_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(b'{"a":1}\n{"b"' + b"x" * 200_000)
    lines = WholeLines(path)
    lines.add(b'{"c":3}\n')
    lines.close()
    assert path.read_bytes() == b'{"a":1}\n{"c":3}\n'


async def test_a_disk_that_stands_still_keeps_no_record_from_being_made(tmp_path: Path) -> None:
    goes_on, lines = threading.Event(), WriterThread("logs")
    journal = Journal(tmp_path, episodes=False, writer=lines)
    journal.own(0.0)
    journal._file = StillDisk(journal._file, goes_on)  # type: ignore[assignment, arg-type]
    journal.admitted(draw=0, task="t0", seed=0, version=0)
    journal.group("trained", draw=0, task="t0", step=0)
    cutting = asyncio.create_task(journal.cut(1))
    await asyncio.sleep(0)
    journal.admitted(draw=1, task="t1", seed=1, version=0)
    assert not cutting.done(), "a cut counts only when it is on the disk"
    goes_on.set()
    assert (await cutting).lines == 3
    lines.close()
    journal.close()
    assert prove(tmp_path).lines == 4


async def test_a_cut_counts_while_later_records_wait_for_the_disk(tmp_path: Path) -> None:
    goes_on, waits, flushed = threading.Event(), threading.Event(), threading.Event()

    class Busy(WriterThread):
        def flush(self, seconds: float | None = None) -> None:
            super().flush(seconds)
            flushed.set()
            assert waits.wait(60), "the later record is being written when the cut looks"

    lines = Busy("logs")
    journal = Journal(tmp_path, episodes=False, writer=lines)
    journal.own(0.0)
    journal._file = StillDisk(journal._file, goes_on, b'"draw":1', waits)  # type: ignore[assignment, arg-type]
    journal.admitted(draw=0, task="t0", seed=0, version=0)
    cutting = asyncio.create_task(journal.cut(0))
    assert await asyncio.to_thread(flushed.wait, 60)
    journal.admitted(draw=1, task="t1", seed=1, version=0)
    assert (await cutting).lines == 2
    goes_on.set()
    lines.close(60)
    journal.close()
    assert prove(tmp_path).lines == 3


class StillDisk:
    """A file on a disk that takes nothing before an event, or only no lines that hold some bytes."""

    def __init__(
        self, file: BinaryIO, goes_on: threading.Event, kept: bytes = b"", waits: threading.Event | None = None
    ) -> None:
        self.file, self.goes_on, self.kept, self.waits = file, goes_on, kept, waits or threading.Event()

    def write(self, data: bytes) -> int:
        if self.kept in data:
            self.waits.set()
            assert self.goes_on.wait(60), "the loop waited for the disk"
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class FullDisk:
    """A file on a disk with room for some more bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.room = 0

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
