"""Measures how much later a run begins on a Ray cluster than on this machine without one.

Guarantees: the cluster is there before the first measurement and has one node; both sides run the same recipe by the
same command, in turns, and the first turn of each does not count. A run has begun when its controller is ready, so that
its first episode can begin; then it is told to end.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.launch.supervisor import Child, Supervisor

WAIT_SECONDS = 300.0
POLL_SECONDS = 0.02
CPUS = 4  # that the node offers; a run asks for one
OBJECT_STORE_BYTES = 80_000_000


def run(model: str | None = None, repeats: int = 5) -> dict[str, list[float]]:
    """Measure ``repeats`` starts of each kind.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of measurements of each kind, in turns.

    Returns:
        ``local_start_s`` and ``ray_start_s``: seconds from the command to a controller that is ready;
        ``ray_start_extra_s``: the second minus the first of the same turn; ``ray_cluster_s``: seconds until the
        cluster itself answers, once.
    """
    from agentrl.bench.report import default_model
    from agentrl.launch.needed_packages import require_packages
    from agentrl.launch.supervisor import Supervisor

    require_packages({"ray": "agentrl bench ray"})
    path = model or default_model()
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:  # short: paths of sockets have 107 characters
        folder = Path(temporary)
        supervisor = Supervisor(folder / "logs")
        try:
            begun = time.perf_counter()
            address = _cluster(supervisor, folder)
            figures: dict[str, list[float]] = {"ray_cluster_s": [time.perf_counter() - begun]}
            on_ray = ["launch.type=ray", f"launch.ray_address={address}"]
            for repeat in range(repeats + 1):
                local = _start(path, folder, f"local-{repeat}")
                ray = _start(path, folder, f"ray-{repeat}", *on_ray)
                if repeat:
                    new = {"local_start_s": local, "ray_start_s": ray, "ray_start_extra_s": ray - local}
                    for name, value in new.items():
                        figures.setdefault(name, []).append(value)
            return figures
        finally:
            supervisor.stop()


def _cluster(supervisor: "Supervisor", folder: Path) -> str:
    """Starts a cluster of one node on this machine; returns its address, which it says when it has the node."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={_free_port()}"]
    command += ["--disable-usage-stats", "--include-dashboard=false", f"--num-cpus={CPUS}"]
    command += [f"--temp-dir={folder / 'ray'}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    if find_spec("grpc") is not None:  # the server of ray:// addresses then starts too, at a port that may be taken
        command.append(f"--ray-client-server-port={_free_port()}")
    head = supervisor.start("ray", command, env={"RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"})
    _until(lambda: bool(_said_address(head)), lambda: head.process.poll() is None, head.tail)
    return _said_address(head)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _said_address(head: "Child") -> str:
    """Returns the address that the head has printed; empty before it has."""
    for line in head.log.read_text(errors="replace").splitlines():
        if "--address=" in line:
            return line.partition("--address=")[2].strip().strip("'\"")
    return ""


def _start(model: str, folder: Path, name: str, *settings: str) -> float:
    """Returns the seconds from the command of a run to its controller that is ready, and ends the run."""
    command = [sys.executable, "-m", "agentrl", "recipe", "run", "arithmetic_grpo", f"name={name}"]
    command += [f"model.name={model}", f"launch.run_dir={folder}", "launch.device=cpu", *settings]
    ready, log = folder / name / "processes" / "controller.json", folder / f"{name}.out"
    with open(log, "wb") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"COLUMNS": "160"}
        )
    try:
        _until(lambda: _is_json(ready), lambda: process.poll() is None, log.read_text)
        return time.perf_counter() - begun
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_SECONDS)


def _is_json(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or not written to its end
        return False


def _until(true: Callable[[], bool], lives: Callable[[], bool], said: Callable[[], str]) -> None:
    """Waits until something is so.

    Raises:
        RuntimeError: A process ended before, or it took too long; the message is what the process printed.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        if not lives() or time.monotonic() > deadline:
            raise RuntimeError(said())
        time.sleep(POLL_SECONDS)
