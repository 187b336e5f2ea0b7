"""Checkpoints that are written beside training: what is in them, when they count, and what a failure says."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from agentrl.train.checkpoint_saver import CheckpointFailed, CheckpointSaver
from agentrl.train.checkpoint_state import latest_checkpoint, read_state

SECONDS = 60  # longest wait for anything; a test that needs it has failed


class Disk:
    """A disk that writes nothing until it is let, and then may be full."""

    def __init__(self) -> None:
        self.begun, self.free, self.full = threading.Event(), threading.Event(), False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made, write = Disk(), FileSystemWriter.write_data

    def held(self: FileSystemWriter, *args: Any) -> Any:
        made.begun.set()
        assert made.free.wait(SECONDS)
        if made.full:
            raise OSError(28, "No space left on device")
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", held)
    yield made
    made.free.set()


def state(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    weight = torch.full((4, 3), value)
    sharded = DTensor.from_local(torch.full((2, 2), value), mesh, [Replicate()])
    return {"model": {"plain": weight, "sharded": sharded}, "optimizer": {"step": torch.tensor(value), "rate": value}}


def read(folder: Path, mesh: DeviceMesh) -> list[float]:
    """The values of every entry."""
    found = state(mesh, 0.0)
    load(found, checkpoint_id=str(folder))
    model, optimizer = found["model"], found["optimizer"]
    tensors = [model["plain"], model["sharded"].to_local(), optimizer["step"]]
    return [*(float(tensor.min()) for tensor in tensors), optimizer["rate"]]


def test_what_is_written_is_the_state_at_the_call_whatever_training_does_meanwhile(
    mesh: DeviceMesh, tmp_path: Path, disk: Disk
) -> None:
    saver, tensors = CheckpointSaver(tmp_path, keep=2), state(mesh, 1.0)
    saver.save(1, tensors, {"step": 1})
    assert disk.begun.wait(SECONDS)
    for tensor in (*tensors["model"].values(), tensors["optimizer"]["step"]):
        tensor.fill_(9.0)
    disk.free.set()
    saver.wait()
    assert read(tmp_path / "step-000001", mesh) == [1.0, 1.0, 1.0, 1.0]


def test_a_process_that_is_killed_in_a_save_leaves_the_checkpoint_before_it(
    mesh: DeviceMesh, tmp_path: Path, disk: Disk
) -> None:
    """What stands on the disk while a save goes on is what ``kill -9`` leaves; the next run's save removes the rest."""
    saver = CheckpointSaver(tmp_path, keep=1)
    disk.free.set()
    saver.save(1, state(mesh, 1.0), {"step": 1})
    saver.wait()
    disk.free.clear()
    disk.begun.clear()
    saver.save(2, state(mesh, 2.0), {"step": 2})
    assert disk.begun.wait(SECONDS)
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-000001" and read_state(newest) == {"step": 1}
    assert read(newest, mesh)[0] == 1.0
    disk.free.set()
    saver.wait()
    assert [one.name for one in tmp_path.iterdir()] == ["step-000002"], "the older one is pruned afterwards"
    (tmp_path / ".partial-step-000007").mkdir()
    again = CheckpointSaver(tmp_path, keep=1)
    again.save(3, state(mesh, 3.0), {"step": 3})
    again.wait()
    assert [one.name for one in tmp_path.iterdir()] == ["step-000003"]


def test_one_save_at_a_time(mesh: DeviceMesh, tmp_path: Path, disk: Disk) -> None:
    saver = CheckpointSaver(tmp_path, keep=2)
    saver.save(1, state(mesh, 1.0), {"step": 1})
    assert disk.begun.wait(SECONDS)
    second = threading.Thread(target=saver.save, args=(2, state(mesh, 2.0), {"step": 2}))
    second.start()
    assert not (tmp_path / ".partial-step-000002").exists() and not (tmp_path / "step-000001").exists()
    disk.free.set()
    second.join(SECONDS)
    assert (tmp_path / "step-000001").is_dir(), "the first is complete before the second begins"
    saver.wait()
    assert json.loads((tmp_path / "step-000002" / "state.json").read_text()) == {"step": 2}


@pytest.mark.parametrize("told_by", ["settle", "wait", "save"])
def test_a_full_disk_is_told_by_the_next_call_and_the_checkpoint_before_it_stands(
    mesh: DeviceMesh, tmp_path: Path, disk: Disk, told_by: str
) -> None:
    saver = CheckpointSaver(tmp_path, keep=1)
    disk.free.set()
    saver.save(1, state(mesh, 1.0), {"step": 1})
    assert saver.settle() and not saver.settle()
    disk.full = True
    saver.save(2, state(mesh, 2.0), {"step": 2})
    written = saver._written
    assert written is not None and written.exception(SECONDS) is not None
    calls = {"settle": saver.settle, "wait": saver.wait, "save": lambda: saver.save(3, state(mesh, 3.0), {"step": 3})}
    with pytest.raises(CheckpointFailed, match=r"step-000002 could not .*newest checkpoint is step-000001: .*No space"):
        calls[told_by]()
    saver.wait()
    assert [one.name for one in tmp_path.iterdir()] == ["step-000001"]


def test_a_save_that_does_not_end_is_left_in_time(mesh: DeviceMesh, tmp_path: Path, disk: Disk) -> None:
    saver = CheckpointSaver(tmp_path, keep=1)
    saver.save(1, state(mesh, 1.0), {"step": 1})
    with pytest.raises(CheckpointFailed, match=r"not written within 0\.01 s"):
        saver.wait(0.01)
