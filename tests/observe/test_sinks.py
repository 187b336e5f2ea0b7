import json
import math
from pathlib import Path

import pytest

from agentrl.observe.sinks import MetricsTail, MetricsWriter, read_metrics
from tests.rollout.test_journal import FullDisk


def test_each_record_is_one_line_at_once(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "run", tensorboard=False, clock=lambda: 12.5)
    writer.write(3, {"reward/mean_drawn": 0.5, "bad": math.nan})
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 3, "time": 12.5, "reward/mean_drawn": 0.5, "bad": None}
    writer.close()
    writer.close()


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step":1,"time":0,"a":1}\n{"step":2,"ti')
    assert [record["step"] for record in read_metrics(file)] == [1]
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(2, {"a": 2.0})
    writer.close()
    assert [record["a"] for record in read_metrics(file)] == [1, 2]


def test_records_of_one_step_are_read_as_one_and_later_values_win(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"a": 1.0, "b": 1.0})
    writer.write(1, {"a": 2.0})
    writer.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["a"], record["b"]) == (2.0, 1.0)


def test_a_damaged_line_costs_no_other(tmp_path: Path):
    """A power failure leaves zeros where a line was to be."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step":1,"time":0,"a":1}\n\0\0\0\n{"step":null}\n[3]\n{"step":2,"time":0,"a":2}\n')
    assert [record["a"] for record in read_metrics(file)] == [1, 2]
    writer = MetricsWriter(tmp_path, tensorboard=False)
    assert writer.void_after(1)
    writer.close()
    assert file.read_bytes() == b'{"step":1,"time":0,"a":1}\n'


def test_resuming_voids_later_steps(tmp_path: Path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(1, 6):
        writer.write(step, {"a": float(step)})
    writer.void_after(3)
    writer.write(4, {"a": 40.0})
    writer.close()
    assert [record["a"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 40]


def test_tensorboard_events_are_written_too(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, {"reward/mean_drawn": 0.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean_drawn" in events.read_bytes()


def test_a_growing_metrics_file_is_read_line_by_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    tail = MetricsTail(path)
    assert list(tail.new()) == [], "what stood there before the run went on is not new"
    with open(path, "a") as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert list(tail.new()) == [{"step": 1}]
        file.write('ep": 2}\n')
        file.flush()
        assert list(tail.new()) == [{"step": 2}]


@pytest.mark.parametrize("skip", [True, False])
def test_a_file_that_a_resume_cuts_gives_no_record_twice_and_none_is_lost(tmp_path: Path, skip: bool) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(9):
        writer.write(step, {"reward/mean_drawn": step / 7})
    tail = MetricsTail(tmp_path / "metrics.jsonl", skip=skip)
    assert [one["step"] for one in tail.new()] == ([] if skip else list(range(9)))
    writer.void_after(4)
    writer.write(5, {"a": 1.0})
    assert [one["step"] for one in tail.new()] == [5]
    for step in range(6, 20):
        writer.write(step, {"a": 1.0})
    assert [one["step"] for one in tail.new()] == list(range(6, 20))


def test_records_that_a_full_disk_refuses_are_written_when_there_is_room(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, tensorboard=False, clock=lambda: 1.0)
    disk = FullDisk(writer._file)
    writer._file, disk.room = disk, 7
    writer.write(1, {"a": 1.0})
    writer.write(2, {"a": 2.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    disk.room = 1000
    writer.write(3, {"a": 3.0})
    assert [one["a"] for one in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
    assert ["cannot be written now" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("room", [1000, 0])
def test_records_that_wait_for_room_at_the_end_are_written_or_their_loss_is_said(tmp_path: Path, caplog, room: int):
    writer = MetricsWriter(tmp_path, tensorboard=False, clock=lambda: 1.0)
    disk = FullDisk(writer._file)
    writer._file = disk
    writer.write(1, {"a": 1.0})
    disk.room = room
    writer.close()
    writer.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == bool(room)
    assert caplog.text.count("lacks its last") == (not room)


def test_a_damaged_line_of_a_followed_file_is_left_out(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\x00\n[3]\n{"step": 2}\n{"st')
    assert [record["step"] for record in MetricsTail(path, skip=False).new()] == [1, 2]
    assert caplog.text.count("damaged line") == 2
