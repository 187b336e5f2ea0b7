"""A server that stands still is told in the terminal: once, in one line, with what becomes of the run."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.inference.router import MISSED_PROBES, Router
from agentrl.launch.server_news import ServerNews
from agentrl.observe.live import LiveView
from tests.inference.fakes import FakeBackend, answer

GONE = (
    "server http://1 is taken out: no answer to 3 probes in a row; the run continues with 1 other",
    "server http://0 is taken out: no answer to 3 probes in a row; no other is left: requests wait 10 s for one "
    "(inference.patience), then episodes fail",
)


def states(router: Router) -> list[dict[str, Any]]:
    return [asdict(one) for one in router.status()]


async def stands_still(router: Router, backend: FakeBackend) -> None:
    backend.dead = True
    for _ in range(MISSED_PROBES):
        await router.probe()


async def test_a_server_that_stands_still_and_comes_back_is_told_once_each() -> None:
    backends = [FakeBackend(lambda ids, params: answer([7]), f"http://{index}") for index in range(2)]
    router, news = Router(backends), ServerNews(10.0)
    assert news.told(states(router)) == []
    await stands_still(router, backends[1])
    assert news.told(states(router)) == [GONE[0]]
    assert news.told(states(router)) == []
    await stands_still(router, backends[0])
    assert news.told(states(router)) == [GONE[1]]
    router.admit(backends[1])
    assert news.told(states(router)) == ["server http://1 is back, with the current weights"]
    router.remove("http://1")
    assert news.told(states(router)) == [], "a user removed it"


def test_it_is_one_line_in_a_log_and_folded_on_a_terminal(tmp_path: Path) -> None:
    recipe = load_recipe("arithmetic_grpo", [], device="cpu")
    out = io.StringIO()
    LiveView(recipe, tmp_path, Console(file=out, width=80), lambda: 0.0).state(GONE[1])
    assert out.getvalue() == f"[0:00] {GONE[1]}\n"
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    view = LiveView(recipe, tmp_path, console, lambda: 0.0)
    view.state(GONE[1])
    lines = _shown(console, view)
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines).replace("│", " ").split()).count(GONE[1]) == 1, "folded between words"


def _shown(console: Console, view: LiveView) -> list[str]:
    return ["".join(part.text for part in line) for line in console.render_lines(view.render())]
