"""What a launcher does for external servers whose controller was killed in a push."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.inference.router import Router
from agentrl.launch.paused_servers import PAUSED, note_paused, resume_paused, take_over
from agentrl.weights import pauses
from agentrl.weights.pauses import Pauses
from agentrl.weights.transaction import Committed, WeightTransaction
from tests.inference.fakes import FakeBackend, answer

RESUME = {"sglang": "/continue_generation", "vllm": "/resume", "embedded": "/continue_generation"}


class Asked:
    """A server on a port of its own that answers 200 to everything and remembers the paths."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                paths.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.server.shutdown()
    made.server.server_close()


def recipe(*urls: str, engine: str = "sglang") -> Recipe:
    settings = [f"inference.engine={engine}", f"inference.urls={json.dumps(urls)}"]
    return load_recipe("arithmetic_grpo", settings, device="cpu")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "processes").mkdir()
    return tmp_path


@pytest.mark.parametrize("engine", RESUME)
def test_a_server_that_a_killed_controller_left_paused_is_resumed(asked: Asked, run_dir: Path, engine: str) -> None:
    note_paused(run_dir)([asked.url])
    assert resume_paused(recipe(asked.url, engine=engine), run_dir) == []
    assert asked.paths == [RESUME[engine]]
    assert not (run_dir / "processes" / PAUSED).exists()


def test_a_server_that_this_run_did_not_pause_is_left_alone(asked: Asked, run_dir: Path) -> None:
    """Another run may be in the middle of its push."""
    note = note_paused(run_dir)
    note([asked.url])
    note([])
    assert resume_paused(recipe(asked.url), run_dir) == []
    assert asked.paths == []


def test_a_server_that_cannot_be_resumed_is_named(run_dir: Path) -> None:
    note_paused(run_dir)(["http://127.0.0.1:9"])
    (problem,) = resume_paused(recipe("http://127.0.0.1:9"), run_dir)
    assert problem.startswith("http://127.0.0.1:9 may still be paused, resume it: ")


async def test_the_note_is_there_while_a_push_goes_on_and_gone_afterwards(run_dir: Path) -> None:
    backend = FakeBackend(lambda ids, params: answer([1]), "http://0")
    weights = WeightTransaction(Router([backend]), Committed(0, "/a"), "retract", 9.0, Pauses(note_paused(run_dir)))
    seen: list[object] = []

    async def load(path: str, version: int) -> None:
        seen.append(json.loads((run_dir / "processes" / PAUSED).read_text()))

    backend.load = load  # type: ignore[method-assign]
    await weights.join(backend)
    assert seen == [["http://0"]] and not (run_dir / "processes" / PAUSED).exists()


@pytest.mark.parametrize("stays", [True, False])
async def test_an_evaluation_resumes_a_server_that_stays_paused(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    monkeypatch.setattr(pauses, "LOOK_SECONDS", 0.001)
    backend = FakeBackend(lambda ids, params: answer([1]), "http://0")
    backend.held_by_other = stays
    await take_over(backend, 0.01)
    assert [name for name, _ in backend.calls] == ["resume"] * stays
