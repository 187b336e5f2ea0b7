"""Rollout workers are started again when they end, with pauses, and not for ever."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.host.entry import REFUSED
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor
from agentrl.launch.worker_watch import LOST_WORKERS, MOST_DEATHS, READY, WINDOW_SECONDS, RestartRule, WorkerWatch
from tests.rollout.worker_fakes import Clock

WAITS = "import time\ntime.sleep(600)"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs")
    yield made
    made.stop()


def watching(
    supervisor: Supervisor, folder: Path, clock: Clock, code: str, count: int = 1, wait: bool = True
) -> WorkerWatch:
    made = WorkerWatch(
        supervisor, range(count), lambda index: [sys.executable, "-c", code, str(index)], {}, folder, clock
    )
    made.start()
    if not wait:
        return made
    for index in range(count):
        (folder / READY.format(index)).write_text("{}")
    made.wait_ready(10.0)
    return made


def ended(supervisor: Supervisor, index: int = 0) -> None:
    """Wait until a worker's process has ended."""
    supervisor._children[index].process.wait(30)


def test_a_pause_doubles_with_each_death_and_too_many_deaths_are_the_end() -> None:
    clock = Clock()
    rule = RestartRule(clock)
    pauses = []
    for _ in range(MOST_DEATHS):
        due = rule.died()
        assert due is not None
        pauses.append(due - clock.now)
        clock.now = due
    assert pauses == [1, 2, 4, 8, 16]
    assert rule.died() is None
    clock.now += WINDOW_SECONDS
    assert rule.died() == clock.now + 1, "deaths of long ago do not count"


def test_a_killed_worker_is_started_again_after_a_pause(supervisor: Supervisor, tmp_path: Path) -> None:
    clock = Clock()
    watch = watching(supervisor, tmp_path, clock, WAITS, count=2)
    first, second = supervisor._children
    assert watch.poll() == []
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait(30)
    supervisor.check()  # no failure of the run
    (text,) = watch.poll()
    assert text.startswith("worker-1 was killed by SIGKILL; it is started again") and "worker-1.log" in text
    assert supervisor._children == [first] and watch.poll() == []
    clock.now += 1
    assert watch.poll() == [] and [one.name for one in supervisor._children] == ["worker-0", "worker-1"]


def test_one_that_ends_too_often_ends_the_run_with_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    clock = Clock()
    watch = watching(supervisor, tmp_path, clock, "print('no module named gym'); raise SystemExit(3)")
    for _ in range(MOST_DEATHS):
        ended(supervisor)
        watch.poll()
        clock.now += 20
        watch.poll()
    ended(supervisor)
    with pytest.raises(
        ChildFailed, match=r"rollout.workers=1\) ended 6 times within 600 s(.|\n)*code 3(.|\n)*no module"
    ):
        watch.poll()


def test_what_a_dead_worker_left_in_its_session_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    """An environment's own process, which nobody closes when its worker is killed."""
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, os, signal\n"
        f"left = subprocess.Popen([sys.executable, '-c', {WAITS!r}])\n"
        f"open({str(pid)!r}, 'w').write(str(left.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    watch = watching(supervisor, tmp_path, Clock(), code)
    ended(supervisor)
    left = psutil.Process(int(pid.read_text()))
    watch.poll()
    psutil.wait_procs([left], timeout=30)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_the_controller_gave_up_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    """It may be stopped, or hang where no signal reaches it."""
    watch = watching(supervisor, tmp_path, Clock(), WAITS)
    (child,) = supervisor._children
    os.kill(child.process.pid, signal.SIGSTOP)
    (tmp_path / LOST_WORKERS).write_text(json.dumps({"worker-0": child.process.pid}))
    (text,) = watch.poll()
    assert "SIGKILL" in text


def test_the_end_of_the_run_is_no_death_that_a_user_has_to_know(supervisor: Supervisor, tmp_path: Path) -> None:
    watch = watching(supervisor, tmp_path, Clock(), "")
    ended(supervisor)
    assert watch.poll() == []


def test_a_worker_that_refuses_before_it_is_ready_ends_the_run_with_its_line(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    code = f"print('refused: no module named gym'); raise SystemExit({REFUSED})"
    watch = watching(supervisor, tmp_path, Clock(), code, wait=False)
    ended(supervisor)
    with pytest.raises(ChildRefused, match=r"^no module named gym$"):
        supervisor.check()  # while the servers load
    with pytest.raises(ChildRefused):
        watch.wait_ready(10.0)
