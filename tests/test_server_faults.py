"""Servers that are stopped for a while, or killed and started again, in real runs: nothing is lost."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentrl.launch.run_folders import check_journal, run_info
from agentrl.launch.supervisor import Child, Supervisor
from tests.end_to_end import SECONDS, command, environment, metrics, overrides

STEPS = 8


@contextmanager
def server(model: Path, folder: Path, port: int) -> Iterator[Callable[[], Child]]:
    """Gives a function that starts a server of one's own at a port."""
    supervisor = Supervisor(folder / "logs")

    def start() -> Child:
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        options = ("--engine", "embedded", "--model", str(model), "--dtype", "float32", "--port", str(port))
        line = command("serve", *options, "--ready-file", str(ready))
        child = supervisor.start("serve", line, env=environment(), replaceable=True)
        supervisor.wait_ready(child, ready, SECONDS)
        return child

    try:
        yield start
    finally:
        supervisor.stop()


def trained(model: Path, folder: Path, at_step: int, then: Callable[[], object], *more: str) -> str:
    """Runs all steps and does something when a step is done; the run must train each draw once. Returns its output."""
    settings = overrides(model, folder, "x", f"trainer.total_steps={STEPS}", "inference.probe_seconds=0.5", *more)
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *settings),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if (found := re.search(r"\] step (\d+)/", line)) and int(found[1]) == at_step:
                then()
        assert process.wait(SECONDS) == 0, "".join(lines)
    finally:
        process.kill()
    records = metrics(folder / "x")
    assert [one["step"] for one in records] == list(range(STEPS + 1))
    assert all(one["mismatch/ratio_max"] < 1e-4 for one in records[1:]), "stale weights were sampled from"
    assert records[-1]["eval/invalid"] == 0
    proof = check_journal(run_info(folder / "x"))
    assert proof.outcomes["trained"] == 4 * STEPS
    return "".join(lines)


def free_port() -> int:
    """Returns a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.long
def test_the_run_goes_on_without_a_server_that_is_stopped(tiny_model: Path, tmp_path: Path) -> None:
    """One of two servers stands still (SIGSTOP) from step 2 on; it is let go when the run is over."""
    ports = free_port(), free_port()
    with server(tiny_model, tmp_path / "0", ports[0]) as one, server(tiny_model, tmp_path / "1", ports[1]) as other:
        one()
        still = psutil.Process(other().process.pid)
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        try:
            said = trained(tiny_model, tmp_path, 2, still.suspend, f"inference.urls=[{urls}]", "inference.patience=10")
        finally:
            still.resume()
    log = (tmp_path / "x" / "logs" / "controller.log").read_text()
    gone = f"http://127.0.0.1:{ports[1]} is taken out: no answer to 3 probes in a row"
    assert gone in log and f"{gone}; the run continues with 1 other" in said


@pytest.mark.long
def test_the_run_waits_for_its_only_server_that_was_killed_and_started_again(tiny_model: Path, tmp_path: Path) -> None:
    """It comes back with the starting weights, gets the version that the run is at, and nothing is lost."""
    with server(tiny_model, tmp_path, port := free_port()) as start:
        first = start()

        def again() -> None:
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait(SECONDS)
            start()

        trained(tiny_model, tmp_path, 2, again, f"inference.urls=[http://127.0.0.1:{port}]")
