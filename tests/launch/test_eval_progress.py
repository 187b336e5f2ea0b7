"""Progress is told in one line, and several evaluations in one table."""

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.core.episode import Episode
from agentrl.evaluate.prices import Price
from agentrl.evaluate.tally import Tally
from agentrl.launch import eval_progress, several
from agentrl.launch.eval_progress import EvalProgress
from agentrl.launch.results import RunStopped
from tests.launch.test_evaluation_api import Api


def episode(number: int) -> Episode:
    return Episode(
        group_id=f"eval0-{number}", task_id=str(number), index=0, seed=0, reward=1.0, stop_reason="terminated",
        metrics={"accuracy": float(number % 2)},
    )  # fmt: skip


def run(console: Console, episodes: int, seconds: float, judged: int = 0) -> None:
    """An evaluation whose episodes take so many seconds each."""
    now = 0.0
    evaluator: Any = SimpleNamespace(
        total=episodes,
        done=0,
        judged=[None] * judged,
        tally=Tally(1),
        price=Price(1, 1),
        ends=SimpleNamespace(cost=0.25),
    )
    with EvalProgress(evaluator, console, lambda: now):
        for number in range(episodes):
            now += 0.0 if number < judged else seconds
            evaluator.done += 1
            evaluator.tally.add(episode(number))
            evaluator.on_episode(episode(number))


def test_without_a_terminal_plain_lines_come_every_ten_seconds() -> None:
    out = io.StringIO()
    run(Console(file=out, width=80), 40, 1.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and "\x1b" not in out.getvalue()
    assert lines[1] == "20/40  1.0/s  accuracy 50.0% [29.3, 70.7]  cost 0.25  0:00:20 left"


def test_the_rate_is_of_what_was_asked_and_not_of_what_was_judged_before() -> None:
    out = io.StringIO()
    run(Console(file=out, width=80), 60, 5.0, judged=40)
    assert out.getvalue().splitlines()[1].startswith("44/60  12.0/min"), out.getvalue()


def test_on_a_terminal_it_is_one_line_of_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_progress, "_DRAW_SECONDS", 0.0)
    out = io.StringIO()
    run(Console(file=out, width=80, force_terminal=True), 50, 0.01)
    text = "".join(part.rpartition("\r")[2] for part in out.getvalue().split("\n"))
    assert "accuracy" in out.getvalue() and text


async def test_several_environments_and_models_are_evaluated_in_one_go(tmp_path: Path) -> None:
    out, api = io.StringIO(), Api()
    async with api.serving() as url:

        def work() -> int:
            return several.evaluate_several(
                ["arithmetic", "retry", "nonsense"], ["m/one", "two"], ["sampling.max_new_tokens=9"],
                output=tmp_path / "all", console=Console(file=out, width=100), base_url=url, tasks=2,
            )  # fmt: skip

        code = await asyncio.to_thread(work)
        asked = len(api.requests)
        assert await asyncio.to_thread(work) == code and len(api.requests) == asked, "the same again asks for nothing"
    assert code == 1 and out.getvalue().count("failed") >= 2, "the environment that does not exist"
    found = sorted(path.parent.name for path in (tmp_path / "all").glob("*/result.json"))
    assert found == ["arithmetic--m-one", "arithmetic--two", "retry--m-one", "retry--two"]
    assert {body["model"] for body in api.requests} == {"m/one", "two"}
    table = out.getvalue()[out.getvalue().index("all evaluations") :]
    assert "m/one" in table and "accuracy" in table and "0.0%" in table
    assert json.loads((tmp_path / "all" / "retry--two" / "setup.json").read_text())["model"] == "two"


async def test_the_same_several_again_go_on_where_they_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --output, as after ``kill -9``: what is judged is not asked again; a call that is done begins anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(several.time, "strftime", lambda form: "now")
    out, api = io.StringIO(), Api()
    async with api.serving() as url:

        def work(models: tuple[str, ...] = ("one", "two")) -> int:
            return several.evaluate_several(
                ["arithmetic"], models, ["sampling.max_new_tokens=9"],
                output=None, console=Console(file=out, width=200), base_url=url, tasks=4, resume=False,
            )  # fmt: skip

        assert await asyncio.to_thread(work) == 0 and len(api.requests) == 8
        base = tmp_path / "runs" / "eval-now"
        (base / "arithmetic--two" / "result.json").unlink()
        episodes = base / "arithmetic--two" / "eval-episodes.jsonl"
        episodes.write_text("".join(episodes.read_text().splitlines(keepends=True)[:1]))
        assert await asyncio.to_thread(work) == 0 and len(api.requests) == 8 + 3
        assert f"going on in {Path('runs') / 'eval-now'}" in out.getvalue()
        assert await asyncio.to_thread(work, ("one",)) == 0 and len(api.requests) == 11 + 4, "another call"
        assert await asyncio.to_thread(work) == 0 and len(api.requests) == 15 + 8, "it was done"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["eval-now", "eval-now-2", "eval-now-3"]


async def test_several_that_are_stopped_show_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, api, begun = io.StringIO(), Api(), iter((False, True))
    own = several.evaluate

    def evaluate(*given: Any, **options: Any) -> Any:
        if next(begun):
            raise RunStopped("stopped", None)
        return own(*given, **options)

    monkeypatch.setattr(several, "evaluate", evaluate)
    async with api.serving() as url:

        def work() -> int:
            return several.evaluate_several(
                ["arithmetic"], ["one", "two"], ["sampling.max_new_tokens=9"],
                output=tmp_path / "all", console=Console(file=out, width=100), base_url=url, tasks=2,
            )  # fmt: skip

        assert await asyncio.to_thread(work) == 130
    table = out.getvalue()[out.getvalue().index("all evaluations") :]
    assert "one" in table and "two" not in table


def test_models_with_like_names_have_folders_of_their_own() -> None:
    deep = "/data/" + "very/" * 30 + "long/run/checkpoints/step-"
    names = several.folder_names([("gsm8k", model) for model in ("a/b", "a-b", f"{deep}100", f"{deep}200", None, "c")])
    assert len(set(names)) == 6 and max(map(len, names)) < 120
    assert names[4:] == ["gsm8k--its-own-model", "gsm8k--c"]


def test_while_no_episode_ends_the_line_says_since_when() -> None:
    out, now = io.StringIO(), [0.0]
    evaluator: Any = SimpleNamespace(
        total=9, done=0, judged=None, tally=Tally(1), price=None, ends=SimpleNamespace(cost=0.0)
    )
    with EvalProgress(evaluator, Console(file=out, width=80), lambda: now[0]) as progress:
        for second in (5.0, 12.0, 15.0, 60.0):
            now[0] = second
            progress.tick()
    assert out.getvalue().splitlines() == ["0/9  none ended for 12 s", "0/9  none ended for 60 s"]
