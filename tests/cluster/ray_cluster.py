"""A Ray cluster of virtual nodes on this machine; a node can die as one that loses its power does."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

SETTINGS = {  # a dead node is told after some eight seconds, and a starved one is not taken for dead
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 8,
    "worker_register_timeout_seconds": 300,
}
START_SECONDS = 300.0


class RayCluster:
    """A head that takes no run, and nodes that do; each is a ``ray start --block`` with its own processes below it.

    Args:
        token: Token that the cluster wants of everyone; empty for none.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.port, client = _ports(2)
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: paths of sockets have 107 characters
        self._nodes: list[subprocess.Popen[bytes]] = []
        settings = f"--system-config={json.dumps(SETTINGS)}"
        ports = [f"--port={self.port}", f"--ray-client-server-port={client}"]
        self._ray("--head", *ports, "--num-cpus=1", "--include-dashboard=false", settings)
        self.address = ""
        self._until_up(1)
        self.client_address = f"ray://127.0.0.1:{client}"

    def _ray(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
        if "--head" in arguments:
            command.append(f"--temp-dir={self._folder}")
        auth = (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token} if self._token else {"RAY_AUTH_MODE": "disabled"}
        )
        env = {**os.environ, **auth, "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}
        node = subprocess.Popen(
            [*command, "--object-store-memory=80000000"],
            stdin=subprocess.DEVNULL,
            stdout=open(self._folder / f"node-{len(self._nodes)}.log", "wb"),  # noqa: SIM115  # the child's
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        self._nodes.append(node)
        return node

    def add(self, **resources: float) -> "subprocess.Popen[bytes]":
        """Adds a node with four CPUs and the resources; GPUs need not be there."""
        gpus = f"--num-gpus={int(resources.pop('GPU', 0))}"
        node = self._ray(f"--address={self.address}", "--num-cpus=4", gpus, f"--resources={json.dumps(resources)}")
        self._until_up(sum(one.poll() is None for one in self._nodes))
        return node

    def _until_up(self, count: int) -> None:
        """Waits until the cluster has so many living nodes."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.address = self.address or self._said_address()
            if self.address and (self._token or self._living() >= count):  # with a token we are not let in
                return
            logs = "\n".join(file.read_text() for file in self._folder.glob("node-*.log"))
            assert all(one.poll() is None for one in self._nodes[-1:]), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)

    def _said_address(self) -> str:
        """Address that the head has printed."""
        text = (self._folder / "node-0.log").read_text()
        for line in text.splitlines():
            if "--address=" in line:
                return line.partition("--address=")[2].strip().strip("'\"")
        return ""

    def _living(self) -> int:
        """Number of nodes that the head takes for alive."""
        from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # a compiled module

        try:
            nodes = GcsClient(address=self.address).get_all_node_info()
        except Exception:  # Ray raises errors of its own kind until the head answers
            return 0
        return sum(node.state == 0 for node in nodes.values())

    def node_of(self, words: str) -> "subprocess.Popen[bytes]":
        """Returns the node on which a process with such a command line runs."""
        return self._found(words)[0]

    def actor_of(self, words: str) -> psutil.Process:
        """Returns the actor that started a process with such a command line."""
        actor = self._found(words)[1].parent()
        assert actor is not None
        return actor

    def _found(self, words: str) -> "tuple[subprocess.Popen[bytes], psutil.Process]":
        for node in self._nodes:
            if node.poll() is not None:
                continue
            for one in psutil.Process(node.pid).children(recursive=True):
                if words in " ".join(one.cmdline()):
                    return node, one
        raise AssertionError(f"no node runs {words}")

    def kill(self, node: "subprocess.Popen[bytes]") -> None:
        """The node dies, with all that runs on it."""
        _kill_family(node)

    def close(self) -> None:
        """Ends all nodes."""
        for node in reversed(self._nodes):
            _kill_family(node)
        shutil.rmtree(self._folder, ignore_errors=True)


def _ports(count: int) -> list[int]:
    """Returns ports that are free."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def _kill_family(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and all its descendants at one moment, as far as there is one."""
    try:
        top = psutil.Process(process.pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        process.wait()
        return
    for one in family:
        try:
            one.suspend()  # none of them may notice that another one is gone
        except psutil.NoSuchProcess:
            continue
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=20)
