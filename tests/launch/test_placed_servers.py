"""Servers of a machine that runs servers only, and what the head makes of them."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.config.recipe import Recipe
from agentrl.host.key_guard import KEY_ENV
from agentrl.host.process import write_json
from agentrl.inference.http import Access
from agentrl.inference.kinds.kind import Capabilities, ServerKind, ServerStart
from agentrl.launch import door
from agentrl.launch import fleet as fleet_module
from agentrl.launch.addresses import MachineError
from agentrl.launch.door import Visit
from agentrl.launch.fleet import FAILED, SECRET_FILE, Fleet, write_failure
from agentrl.launch.placed_servers import FOLDER, NodeServers
from agentrl.launch.placement import node
from agentrl.launch.rank_network import OpenPort, require_reach
from agentrl.launch.servers import start_servers
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor

PROGRAM = """
import http.server, json, os, sys
guarded, ready = sys.argv[1] == "True", sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        right = self.headers.get("authorization") == "Bearer " + os.environ["KEY_ENV"]
        self.send_response(200 if right or not guarded else 401)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer((sys.argv[3], 0), Handler)
open(ready, "w").write(json.dumps({"url": "http://" + ":".join(map(str, server.server_address))}))
server.serve_forever()
""".replace("KEY_ENV", KEY_ENV)


class Small(ServerKind):
    """A server that does nothing but check its key."""

    capabilities = Capabilities(starts=True, token_logprobs=True, remote=True, transports=("disk",))

    def command(self, start: ServerStart) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(start.guarded), str(start.ready_file), start.host]


class Open(Small):
    """A server that ignores the key."""

    def command(self, start: ServerStart) -> list[str]:
        return [sys.executable, "-c", PROGRAM, "False", str(start.ready_file), start.host]


class Broken(Small):
    """A server that does not start."""

    def command(self, start: ServerStart) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no such GPU')"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "EXPLAIN_SECONDS", 1.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "processes").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def recipe(kind: str = "Small", servers: int = 2, nodes: int = 1, trainers: int = 1, **inference: Any) -> Recipe:
    data = {
        "model": {"name": "m"},
        "env": {"id": "arithmetic"},
        "trainer": {"nodes": trainers},
        "inference": {"engine": f"{__file__}:{kind}", "nodes": nodes, "servers": servers, **inference},
        "launch": {"head": "127.0.0.1", "device": "cpu", "node_timeout": 30.0},
    }
    return Recipe.model_validate(data)


class Machine:
    """Another machine's servers, as its launcher runs them."""

    def __init__(self, given: Recipe, run_dir: Path) -> None:
        self.said: list[str] = []
        self.supervisor = Supervisor(run_dir / "logs")
        one = node(given, 1)
        self.servers = NodeServers(
            given, Path("m"), run_dir, self.supervisor, one, "127.0.0.1", "secret", {}, self.said.append
        )

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, self.said
            self.servers.poll()
            time.sleep(0.02)


@pytest.fixture
def machine(run_dir: Path) -> Iterator[Callable[[Recipe], Machine]]:
    made: list[Machine] = []

    def make(given: Recipe) -> Machine:
        made.append(Machine(given, run_dir))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.stop()


def announced(run_dir: Path) -> dict[int, dict[str, Any]]:
    files = (run_dir / "processes" / FOLDER).glob("*.json")
    return {int(file.stem): json.loads(file.read_text()) for file in files}


def test_servers_are_announced_behind_their_key_and_started_again(
    machine: Callable[[Recipe], Machine], run_dir: Path
) -> None:
    here = machine(recipe())
    here.until(lambda: len(announced(run_dir)) == 2)
    before = announced(run_dir)
    assert before[0]["node"] == 1 and before[0]["host"] == socket.gethostname()
    child = here.servers._running[1].child
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    here.until(lambda: announced(run_dir)[1]["url"] != before[1]["url"])
    assert announced(run_dir)[0] == before[0]
    assert "server-1 exited with code -9 and is started again" in here.said[2]


def test_a_server_that_answers_without_the_key_is_not_announced(
    machine: Callable[[Recipe], Machine], run_dir: Path
) -> None:
    here = machine(recipe("Open", servers=1))
    with pytest.raises(ChildFailed, match="answers 200 without the run's key"):
        here.until(lambda: False)
    assert announced(run_dir) == {}


def test_one_that_does_not_start_is_told_with_its_log(machine: Callable[[Recipe], Machine]) -> None:
    here = machine(recipe("Broken", servers=1))
    with pytest.raises(ChildFailed, match=r"server-0 exited with code 1; the end of [\s\S]*no such GPU"):
        here.until(lambda: False)


class Controller:
    """Takes servers in, as the controller's API does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.refuse = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.calls.append((self.command, body["url"], self.headers["authorization"]))
                self.send_response(409 if outer.refuse else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            do_DELETE = do_POST

            def log_message(self, *words: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.access = {"url": f"http://127.0.0.1:{self.server.server_address[1]}"}


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def fleet(run_dir: Path, model: Path) -> Iterator[Fleet]:
    made = Fleet(recipe(), model, run_dir, "secret", resume=False)
    yield made
    made.close()


def come(fleet: Fleet, run_dir: Path, rank: int = 1) -> Visit:
    """A machine arrives at the head."""
    assert fleet.head is not None
    said = {**fleet.head.machine.__dict__, "host": "beta"}
    write_json(run_dir / "processes" / f"node-{rank}.json", said)
    return Visit("127.0.0.1", fleet.head.door, "secret", rank)


def announce(run_dir: Path, number: int, url: str) -> None:
    (run_dir / "processes" / FOLDER).mkdir(exist_ok=True)
    said = {"url": url, "node": 1, "host": "beta"}
    write_json(run_dir / "processes" / FOLDER / f"{number}.json", said)


def listening() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"http://127.0.0.1:{server.getsockname()[1]}"


def nothing() -> None:
    """Finds no failure."""


def test_servers_on_the_head_want_the_key_where_other_machines_call_them(run_dir: Path) -> None:
    supervisor = Supervisor(run_dir / "logs")
    try:
        given, access = recipe(servers=1), Access("secret")
        (url,) = start_servers(given, Path("m"), run_dir / "processes", supervisor, host="127.0.0.1", access=access)
        found = [httpx.get(url, headers=one.headers, trust_env=False).status_code for one in (access, Access(), OTHER)]
        assert found == [200, 401, 401]
    finally:
        supervisor.stop()


OTHER = Access("another run's")


def test_the_secret_is_for_the_owner_alone(fleet: Fleet, run_dir: Path) -> None:
    assert (run_dir / "processes" / SECRET_FILE).stat().st_mode & 0o77 == 0
    assert "secret" not in (run_dir / "processes" / "head.json").read_text()


def test_the_head_waits_for_the_servers_and_takes_later_ones_in(
    fleet: Fleet, run_dir: Path, controller: Controller
) -> None:
    visit, servers = come(fleet, run_dir), [listening() for _ in range(3)]
    for number in range(2):
        announce(run_dir, number, servers[number][1])
    assert fleet.server_urls(nothing, lambda text: None) == [servers[0][1], servers[1][1]]
    fleet.serves_at(controller.access)
    assert fleet.news() == []
    announce(run_dir, 1, servers[2][1])  # started again on another port
    controller.refuse = True
    assert "is not taken in yet" in until_news(fleet)
    controller.refuse = False
    controller.calls.clear()
    assert until_news(fleet) == f"server 1 on node 1 (beta, {servers[2][1]}) has joined in place of {servers[1][1]}"
    key = "Bearer secret"
    assert controller.calls == [("POST", servers[2][1], key), ("DELETE", servers[1][1], key)]
    assert fleet.news() == [] and fleet.news() == []
    write_failure(run_dir, 1, "beta", "server-0 exited with code 1 again", refused=False)
    assert fleet.news() == ["node 1 (beta) has ended: server-0 exited with code 1 again"] and fleet.news() == []
    assert str(fleet.explained(ChildFailed("of its own"))) == "of its own", "the machine of servers is not the reason"
    visit._held.close()
    assert until_news(fleet) == "node 1 (beta) is gone, its servers 0, 1 are lost"
    for server, _ in servers:
        server.close()


def until_news(fleet: Fleet) -> str:
    deadline = time.monotonic() + 30
    while not (found := fleet.news()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def test_a_server_that_the_head_cannot_reach_is_named_with_both_machines(fleet: Fleet, run_dir: Path) -> None:
    visit = come(fleet, run_dir)
    server, closed = listening()
    server.close()
    for number in range(2):
        announce(run_dir, number, closed)
    words = (
        rf"server 0 on node 1 \(beta\) listens, but {socket.gethostname()} cannot connect to 127.0.0.1.*inference.port"
    )
    with pytest.raises(MachineError, match=words):
        fleet.server_urls(nothing, lambda text: None)
    visit.leave()


def test_a_machine_that_fails_or_goes_before_its_servers_are_ready_ends_the_run(
    fleet: Fleet, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = come(fleet, run_dir)
    write_failure(run_dir, 1, "beta", "no such GPU", refused=False)
    with pytest.raises(ChildFailed, match=r"node 1 \(beta\): no such GPU"):
        fleet.server_urls(nothing, lambda text: None)
    (run_dir / "processes" / FAILED / "1.json").unlink()
    monkeypatch.setattr(fleet_module, "REPLACED_SECONDS", 0.0)
    visit._held.close()
    with pytest.raises(ChildFailed, match=r"node 1 \(beta\) is gone before the run began"):
        fleet.server_urls(nothing, lambda text: None)


def test_a_failure_of_ranks_is_explained_by_the_machine_that_is_gone(run_dir: Path, model: Path) -> None:
    fleet = Fleet(recipe(nodes=0, trainers=3), model, run_dir, "secret", resume=False)
    try:
        assert str(fleet.explained(ChildFailed("gloo"))) == "gloo"
        come(fleet, run_dir, 2)._held.close()
        assert str(fleet.explained(ChildFailed("gloo"))) == "node 2 (beta) is gone, its trainer ranks are lost\ngloo"
        write_failure(run_dir, 1, "gamma", "a refusal", refused=True)
        assert isinstance(found := fleet.explained(ChildFailed("gloo")), ChildRefused)
        assert str(found) == "node 1 (gamma): a refusal"
    finally:
        fleet.close()


def test_a_clock_that_differs_is_told_once_however_long_the_machine_has_waited(
    fleet: Fleet, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(door, "time", Clock(iter([now - 100, now, now - 10, now])))  # of a machine, of the head, ...
    late, near = come(fleet, run_dir, 1), come(fleet, run_dir, 2)
    assert until_news(fleet) == "the clock of node 1 (beta) is -100 s off" and fleet.news() == []
    late.leave()
    near.leave()


class Clock:
    """The module ``time`` of two machines that ask for it in turn."""

    def __init__(self, times: Iterator[float]) -> None:
        self._times = times

    def time(self) -> float:
        return next(self._times)


def test_ranks_that_cannot_reach_one_another_are_named_and_end_the_run(run_dir: Path, model: Path) -> None:
    """Before torch waits for them."""
    fleet = Fleet(recipe(nodes=0, trainers=3), model, run_dir, "secret", resume=False)
    try:
        assert fleet.head is not None
        for rank in (1, 2):
            come(fleet, run_dir, rank).leave()
        fleet.meeting(nothing, lambda text: None)  # all ports are the head's own, which is open
        own = OpenPort("127.0.0.1")
        own.close()
        closed = {2: replace(fleet.head.machine, host="gamma", port=own.number)}
        words = rf"{socket.gethostname()} cannot connect to node 2 \(gamma\) at 127.0.0.1:{own.number} .*interface"
        with pytest.raises(MachineError, match=words) as caught:
            require_reach({1: fleet.head.machine, **closed})
        write_failure(run_dir, 1, "beta", str(caught.value), refused=True)  # as joined_run does
        with pytest.raises(ChildFailed, match=rf"node 1 \(beta\): {words}"):
            fleet.news()
        visit = come(fleet, run_dir, 1)  # it was started again, and takes part
        until(lambda: 1 in fleet._door.inside())
        assert fleet.news() == []
        visit.leave()
    finally:
        fleet.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_wait_for_a_lost_machine_are_ended(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LOST_SECONDS", 0.0)
    fleet = Fleet(recipe(nodes=0, trainers=2), model, run_dir, "secret", resume=False)
    try:
        come(fleet, run_dir)._held.close()
        with pytest.raises(ChildFailed, match=r"node 1 \(beta\) is gone, its trainer ranks are lost"):
            while True:
                fleet.news()
                time.sleep(0.01)
    finally:
        fleet.close()
