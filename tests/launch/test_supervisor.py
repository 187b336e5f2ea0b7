"""Child processes: readiness, failures with their log, and nothing left."""

import runpy
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from agentrl.host.entry import REFUSED
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor

PYTHON = sys.executable
FOREVER = "import threading; threading.Event().wait()"


@pytest.fixture
def supervisor(tmp_path: Path):
    made = Supervisor(tmp_path / "logs")
    yield made
    made.stop()


def test_a_child_that_dies_before_it_is_ready_shows_the_end_of_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start("server", [PYTHON, "-c", "print('no such model'); raise SystemExit(3)"])
    with pytest.raises(ChildFailed, match=r"(?s)server .*no such model"):
        supervisor.wait_ready(child, tmp_path / "ready.json", 30.0)


def test_the_end_of_a_log_moves_no_cursor(supervisor: Supervisor, tmp_path: Path) -> None:
    said = r"print('\x1b[32mgreen\x1b[0m \x1b]0;owned\x07'); raise SystemExit(3)"
    child = supervisor.start("server", [PYTHON, "-c", said])
    with pytest.raises(ChildFailed, match=r"\ngreen \\x1b\]0;owned\\x07$"):
        supervisor.wait_ready(child, tmp_path / "ready.json", 30.0)


def test_a_child_that_does_not_come_up_in_time_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start("slow", [PYTHON, "-c", FOREVER])
    with pytest.raises(ChildFailed, match=r"slow was not ready within 0\.3 s"):
        supervisor.wait_ready(child, tmp_path / "ready.json", 0.3)


def test_what_a_ready_child_announces_is_returned(supervisor: Supervisor, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    code = f'import pathlib; pathlib.Path({str(ready)!r}).write_text(\'{{"url": "x"}}\'); {FOREVER}'
    child = supervisor.start("server", [PYTHON, "-c", code])
    assert supervisor.wait_ready(child, ready, 30.0) == {"url": "x"}


def test_the_failure_of_any_child_ends_the_wait_for_another(supervisor: Supervisor) -> None:
    waiting = supervisor.start("trainer", [PYTHON, "-c", FOREVER])
    supervisor.start("server", [PYTHON, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    with pytest.raises(ChildFailed, match="server was killed by SIGKILL"):
        supervisor.wait([waiting], lambda: None)


def test_a_server_that_ends_well_but_too_early_is_a_failure(supervisor: Supervisor) -> None:
    waiting = supervisor.start("trainer", [PYTHON, "-c", FOREVER])
    supervisor.start("server", [PYTHON, "-c", "print('bye')"])
    with pytest.raises(ChildFailed, match=r"(?s)server ended too early.*bye"):
        supervisor.wait([waiting], lambda: None)


def test_a_brief_child_may_end_well_but_not_fail(supervisor: Supervisor) -> None:
    waiting = supervisor.start("trainer", [PYTHON, "-c", "pass"])
    supervisor.start("check", [PYTHON, "-c", "pass"], brief=True).process.wait()
    supervisor.wait([waiting], lambda: None)
    refusing = supervisor.start("check-2", [PYTHON, "-c", "raise SystemExit('not this model')"], brief=True)
    refusing.process.wait()
    with pytest.raises(ChildFailed, match=r"(?s)check-2 exited with code 1.*not this model"):
        supervisor.wait([waiting], lambda: None)


REFUSES = (
    "import sys; from agentrl.host.entry import refuse; code = refuse(ValueError('set x=1\\nor y=2')); "
    "print('said at exit', file=sys.stderr); sys.exit(code)"
)


def test_a_child_that_refuses_what_was_asked_is_its_one_line(supervisor: Supervisor, tmp_path: Path) -> None:
    refusing = supervisor.start("controller", [PYTHON, "-c", REFUSES])
    with pytest.raises(ChildRefused) as found:
        supervisor.wait_ready(refusing, tmp_path / "never.json", 30.0)
    assert str(found.value) == "set x=1 or y=2"


@pytest.mark.parametrize("code", [REFUSED, 1])
def test_without_such_a_line_a_child_has_failed(supervisor: Supervisor, code: int) -> None:
    """A program of others may use the same exit code, and a line alone is no refusal."""
    said = "print('nothing')" if code == REFUSED else "print('refused: x')"
    supervisor.start("server", [PYTHON, "-c", f"{said}; raise SystemExit({code})"]).process.wait()
    with pytest.raises(ChildFailed, match=f"server exited with code {code}") as found:
        supervisor.check()
    assert not isinstance(found.value, ChildRefused)


@pytest.mark.parametrize(("codes", "expected"), [((REFUSED, -15), REFUSED), ((1, -15), 1), ((-9,), 1)])
def test_torchrun_passes_a_workers_refusal_on(
    codes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="none")
        for rank, code in enumerate(codes)
    }

    def main() -> None:
        raise ChildFailedError("worker", failures)

    monkeypatch.setattr("torch.distributed.run.main", main)
    monkeypatch.setattr("agentrl.host.process.die_with_parent", lambda: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("agentrl.launch.torchrun", run_name="__main__")
    assert ended.value.code == expected


def test_stop_ends_children_that_ignore_sigterm_and_their_families(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agentrl.launch.supervisor.GRACE_SECONDS", 0.2)
    ready = tmp_path / "ready"
    grandchild = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOREVER}"
    code = (
        "import signal, subprocess, sys, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True);"
        f"pathlib.Path({str(ready)!r}).write_text(str(p.pid)); p.wait()"
    )
    child = supervisor.start("stubborn", [PYTHON, "-c", code])
    grandchild_pid = supervisor.wait_ready(child, ready, 30.0)
    supervisor.stop()
    assert child.process.poll() is not None
    assert not psutil.pid_exists(int(str(grandchild_pid))) or psutil.Process(grandchild_pid).status() == "zombie"  # type: ignore[arg-type]
    supervisor.stop()


def test_a_peer_that_ends_is_told_of_once_and_the_last_one_is_fatal(supervisor: Supervisor) -> None:
    first = supervisor.start("server-0", [PYTHON, "-c", FOREVER], peer="server")
    second = supervisor.start("server-1", [PYTHON, "-c", FOREVER], peer="server")
    supervisor.check()
    assert supervisor.lost() == []
    first.process.kill()
    first.process.wait()
    supervisor.check()
    (text,) = supervisor.lost()
    assert text.startswith("server-0 was killed by SIGKILL")
    assert supervisor.lost() == []
    second.process.kill()
    second.process.wait()
    assert supervisor.lost() == [], "nobody goes on without the last one"
    with pytest.raises(ChildFailed, match="server-0 was killed"):
        supervisor.check()


def test_a_nice_child_waits_for_others_of_other_sessions_too(supervisor: Supervisor, tmp_path: Path) -> None:
    """Its niceness alone counts among its own processes only where Linux schedules sessions against each other."""
    ready, groups = tmp_path / "ready.json", Path("/proc/self/autogroup")
    before = groups.read_text() if groups.exists() else ""
    child = supervisor.start(
        "server",
        [PYTHON, "-c", f"import pathlib; pathlib.Path({str(ready)!r}).write_text('{{}}'); {FOREVER}"],
        niceness=7,
    )
    supervisor.wait_ready(child, ready, 30.0)
    assert psutil.Process(child.process.pid).nice() == 7
    if groups.exists():
        assert Path(f"/proc/{child.process.pid}/autogroup").read_text().endswith("nice 7\n")
        assert groups.read_text() == before
