"""One launcher for a run's folder: on one machine by a lock, elsewhere by a heartbeat."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.errors import UserError
from agentrl.launch import run_owner
from agentrl.launch.run_owner import ALIVE_SECONDS, FILE, RunOwned, RunOwner, read_owner, this_process


def write_record(folder: Path, age: float, **more: Any) -> None:
    """The record of an owner, whose heartbeat has an age."""
    (folder / FILE).write_text(json.dumps(this_process() | {"started": 1.0} | more))
    then = os.stat(folder / FILE).st_mtime - age
    os.utime(folder / FILE, (then, then))


def taken(folder: Path) -> bool:
    """Whether the folder can be taken."""
    try:
        with RunOwner(folder):
            return True
    except RunOwned:
        return False


def test_a_folder_has_one_owner_who_is_named(tmp_path: Path) -> None:
    with RunOwner(tmp_path) as owner:
        said = rf"run '{tmp_path.name}' is still going: process {os.getpid()} on {socket.gethostname()} holds"
        with pytest.raises(RunOwned, match=said):
            RunOwner(tmp_path).__enter__()
        assert read_owner(tmp_path)["living"]
        owner.end(1, "a server was lost")
    found = read_owner(tmp_path)
    assert (found["living"], found["code"], found["reason"]) == (False, 1, "a server was lost")
    assert taken(tmp_path)


def test_an_owner_that_raised_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunOwner(tmp_path):
        raise RuntimeError("no such model")
    assert read_owner(tmp_path)["reason"] == "RuntimeError: no such model"


def test_a_resume_that_is_refused_leaves_how_the_run_had_ended(tmp_path: Path) -> None:
    with RunOwner(tmp_path) as owner:
        owner.end(0, "")
    with pytest.raises(UserError), RunOwner(tmp_path):
        raise UserError("run 'x' has made all its 3 steps")
    assert read_owner(tmp_path)["code"] == 0


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    """Its record stays as it was: the lock alone decides."""
    code = "import os, sys; from pathlib import Path; from agentrl.launch.run_owner import RunOwner\n"
    code += "RunOwner(Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert "ended" not in json.loads((tmp_path / FILE).read_text())
    assert not read_owner(tmp_path)["living"] and taken(tmp_path)


@pytest.mark.parametrize(
    ("age", "more", "free"),
    [
        (5.0, {"host": "elsewhere"}, False),
        (ALIVE_SECONDS + 1, {"host": "elsewhere"}, True),
        (5.0, {"host": "elsewhere", "ended": 2.0, "code": 0, "reason": ""}, True),
        (5.0, {"boot": "another"}, True),
        (5.0, {}, True),  # on this host, and the lock is free
    ],
)
def test_a_launcher_on_a_host_whose_locks_are_not_seen_lives_as_long_as_its_heart_beats(
    tmp_path: Path, age: float, more: dict[str, Any], free: bool
) -> None:
    write_record(tmp_path, age, **more)
    assert read_owner(tmp_path)["living"] is not free
    assert taken(tmp_path) is free
    if not free:
        beat = read_owner(tmp_path)["beat"]
        assert not taken(tmp_path) and beat >= age, "a refusal must not keep it alive"


@pytest.mark.parametrize(("more", "free"), [({}, False), ({"born": 1.0}, True), ({"pid": 2**22 + 1}, True)])
def test_without_locks_the_process_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], free: bool
) -> None:
    monkeypatch.setattr(run_owner, "_lock", lambda handle, kind: None)
    write_record(tmp_path, 5.0, **more)
    assert taken(tmp_path) is free


def test_a_full_disk_leaves_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_owner.os, "pwrite", full)
    with RunOwner(tmp_path):
        assert not taken(tmp_path)
