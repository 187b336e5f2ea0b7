"""How a process of ours begins, and what ends it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.host.entry import STOPPED, run_arguments

SECONDS = 30
WAITS = (
    "from agentrl.host.entry import begin; begin()\n"
    "try: print('up', flush=True); import signal; signal.pause()\n"
    "finally: print('cleaned up', flush=True)\n"
)


def test_sigterm_ends_a_process_through_its_finally_clauses() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == STOPPED and rest == "cleaned up\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal")
def test_the_end_of_the_parent_ends_it_too() -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.kill()
        rest, _ = process.communicate(timeout=SECONDS)  # the pipe is closed when the child is gone
    assert rest == "cleaned up\n"


def test_every_process_of_a_run_is_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    parser = run_arguments("agentrl.x")
    args = parser.parse_args(["--run-dir", "runs/a", "--model", "m", "--resume"])
    assert (args.run_dir, args.model, args.resume) == (Path("runs/a"), Path("m"), True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model", "m"])
    assert "agentrl.x: error" in capsys.readouterr().err
