"""The server as a process of its own: start, ready file, signals, a port in use."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentrl.engine.__main__ import main
from agentrl.host.entry import REFUSED
from tests.engine.driving import SECONDS

COMMAND = [sys.executable, "-m", "agentrl.engine", "--device", "cpu", "--dtype", "float32", "--threads", "1"]


def test_a_port_in_use_is_one_line_and_code_2(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(tiny), "--port", str(port)]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and f"127.0.0.1:{port}" in error


def test_importing_the_package_stays_light() -> None:
    code = "import sys, agentrl.engine, agentrl.engine.__main__ as m; m.build_parser(); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=SECONDS).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_it_serves_and_a_signal_ends_it_cleanly(tiny: Path, tmp_path: Path) -> None:
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    arguments = ["--model", str(tiny), "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with log.open("w") as sink, subprocess.Popen([*COMMAND, *arguments], stderr=sink, stdout=sink) as process:
        try:
            told = _wait_for(ready, process)
            assert told["pid"] == process.pid and told["dtype"] == "float32" and told["context_length"] == 512
            body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
            with httpx.stream("POST", told["url"] + "/generate", json=body, timeout=SECONDS) as response:
                next(response.iter_lines())
                process.send_signal(signal.SIGTERM)
                assert process.wait(SECONDS) == 0
        finally:
            process.kill()  # else leaving the context would wait for it
    assert "Traceback" not in log.read_text()


def test_a_gone_parent_is_code_1_and_a_wrong_model_a_refusal(tmp_path: Path) -> None:
    for arguments, words, code in ((["--parent-pid", "1"], "parent", 1), ([], "refused: cannot serve", REFUSED)):
        if os.getpid() == 1 and "parent" in words:
            continue
        done = subprocess.run(
            [*COMMAND, "--model", str(tmp_path), *arguments], capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def _wait_for(path: Path, process: subprocess.Popen) -> dict:
    """The ready file's content, or a failure when the process ends first."""
    exited = os.pidfd_open(process.pid)
    try:
        while not path.exists():
            if select.select([exited], [], [], 0.05)[0]:
                raise AssertionError(f"the server ended with {process.poll()}")
    finally:
        os.close(exited)
    return json.loads(path.read_text())
