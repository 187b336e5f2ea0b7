"""Rollout workers of a machine that runs workers only."""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.config.recipe import Recipe
from agentrl.host.entry import REFUSED
from agentrl.host.process import write_json
from agentrl.launch import commands, placed_workers, worker_watch
from agentrl.launch.placed_workers import NodeWorkers
from agentrl.launch.placement import node
from agentrl.launch.run_folders import CONTROLLER
from agentrl.launch.supervisor import ChildFailed, ChildRefused, Supervisor

WORKER = """
import os, pathlib, sys, time
assert os.environ["AGENTRL_SECRET"] == "secret"
processes, index = pathlib.Path(sys.argv[1]), sys.argv[2]
partial = processes / f"partial-{index}"
partial.write_text("{}")
partial.rename(processes / f"worker-{index}.json")
time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(placed_workers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker_watch, "FIRST_PAUSE", 0.0)
    (tmp_path / "run" / "processes").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def supervisor(run_dir: Path) -> Iterator[Supervisor]:
    made = Supervisor(run_dir / "logs")
    yield made
    made.stop()


def workers_of(
    run_dir: Path,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    over: Callable[[], bool],
    said: Callable[[str], None],
    code: str = WORKER,
) -> NodeWorkers:
    """Workers 1 and 3 of four, on the second of two machines."""
    rollout = {"nodes": 2, "workers": 4}
    recipe = Recipe.model_validate(
        {"model": {"name": "m"}, "env": {"id": "arithmetic"}, "rollout": rollout, "launch": {"head": "127.0.0.1"}}
    )
    folder = str(run_dir / "processes")
    monkeypatch.setattr(
        commands, "rollout_worker", lambda model, run_dir, index: [sys.executable, "-c", code, folder, str(index)]
    )
    one = node(recipe, 2)
    assert one.workers == (1, 3)
    return NodeWorkers(recipe, Path("m"), run_dir, supervisor, one, "secret", over, said)


def test_workers_are_started_again_and_end_with_the_head(
    run_dir: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    over = threading.Event()

    def say(text: str) -> None:
        """Kills a worker when both are ready; the head ends when it is started again."""
        said.append(text)
        if len(said) == 1:
            os.kill(supervisor._children[1].process.pid, signal.SIGKILL)
        else:
            over.set()

    with socket.create_server(("127.0.0.1", 0)) as controller:
        url = f"http://127.0.0.1:{controller.getsockname()[1]}"
        write_json(run_dir / CONTROLLER, {"url": "http://127.0.0.1:1", "workers_url": url})
        workers_of(run_dir, supervisor, monkeypatch, over.is_set, say).run()
    assert said[0] == "rollout workers 1, 3 are ready"
    assert said[1].startswith("worker-3 was killed by SIGKILL; it is started again, and its episodes are tried again")


def test_a_controller_that_cannot_be_reached_is_named_with_both_machines(
    run_dir: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run_dir / CONTROLLER, {"url": "http://127.0.0.1:2", "workers_url": "http://127.0.0.1:1"})
    made = workers_of(run_dir, supervisor, monkeypatch, lambda: False, lambda text: None)
    here = re.escape(socket.gethostname())
    words = rf"{here} cannot connect to 127.0.0.1:1 \(Connection refused\), where the controller on the head listens"
    with pytest.raises(ChildFailed, match=words):
        made.run()


def test_a_machine_whose_head_ends_before_the_controller_is_there_waits_no_longer(
    run_dir: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    workers_of(run_dir, supervisor, monkeypatch, lambda: bool(said), said.append).run()
    assert said == ["rollout workers 1, 3 are ready"]


def test_a_worker_that_cannot_begin_is_refused_with_its_own_line(
    run_dir: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"print('refused: no module named gym'); raise SystemExit({REFUSED})"
    made = workers_of(run_dir, supervisor, monkeypatch, lambda: False, lambda text: None, code)
    with pytest.raises(ChildRefused, match=r"^no module named gym$"):
        made.run()
