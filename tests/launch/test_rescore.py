"""Saved transcripts are judged again without a model, and written in the forms that others read."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.launch.export_inspect import is_listed
from agentrl.launch.exported import FORMS, export
from agentrl.launch.rescore import rescore
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal

SCRIPT = "<script>alert(1)</script> | `x` 41"


def reply(number: int, body: dict[str, Any]) -> web.Response | None:
    return [None, answer(content=SCRIPT), answer(content="9" * 30_000), refusal(418)][number % 4]


async def run_once(folder: Path, *settings: str) -> dict[str, Any]:
    folder.mkdir()
    _, _, result = await evaluated(Api(reply), folder, "eval.tasks=8", "rollout.max_concurrent=1", *settings)
    return result


async def test_transcripts_are_judged_by_the_environment_as_it_is_now(tmp_path: Path) -> None:
    first = await run_once(tmp_path / "a", "env.kwargs.digit_reward=0.0")
    before = (tmp_path / "a" / "eval-episodes.jsonl").read_bytes()
    out = io.StringIO()
    console = Console(file=out, width=80)
    found = rescore(tmp_path / "a", ["env.kwargs.digit_reward=0.9"], console=console)
    assert found.run_dir == tmp_path / "a-rescored" and (tmp_path / "a" / "eval-episodes.jsonl").read_bytes() == before
    assert found.evaluation.n == first["eval/n"] == 6, "those without an answer stay invalid"
    assert found.evaluation["accuracy"].mean == first["eval/accuracy"]
    assert found.evaluation["reward"].mean > first["eval/reward"] and "tasks better in B" in out.getvalue()
    for old, new in zip(
        sorted(map(json.loads, before.splitlines()), key=lambda one: one["task_id"]),
        sorted(found.episodes, key=lambda one: one.task_id),
        strict=True,
    ):
        assert new.model_dump(mode="json")["trajectories"] == old["trajectories"] and new.seconds == old["seconds"]
    with pytest.raises(UserError, match="exists: name another"):
        rescore(tmp_path / "a", console=console)
    with pytest.raises(UserError, match="holds no transcripts"):
        rescore(tmp_path, console=console)


@pytest.mark.parametrize("env", ["retry", "calculator"])
async def test_conversations_with_hints_and_tools_are_played_back(env: str, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1+1"}'}}

    def act(number: int, body: dict[str, Any]) -> web.Response:
        calls = env == "calculator" and number % 2
        return answer("tool_calls", content=None, tool_calls=[call]) if calls else answer(content=str(number % 7))

    own = (f"env.id={env}", "env.kwargs={}", "eval.samples=2", "rollout.max_concurrent=1", "eval.tasks=4")
    data = "calculation" if env == "calculator" else "arithmetic"
    folder = tmp_path / "a"
    folder.mkdir()
    _, _, first = await evaluated(Api(act), folder, *own, f"valid_dataset.name={data}")
    found = rescore(folder, console=Console(quiet=True))
    assert first["eval/turns"] > 1 and found.evaluation.n == first["eval/n"] == 8
    again = json.loads((found.run_dir / "result.json").read_text())
    names = [name for name in first if name.startswith("eval/") and "seconds" not in name]
    assert {name: again[name] for name in names} == pytest.approx({name: first[name] for name in names})


async def test_a_transcript_of_another_prompt_judges_nothing(tmp_path: Path) -> None:
    await run_once(tmp_path / "a")
    other = tmp_path / "other.py"
    other.write_text(
        "from agentrl.envs.arithmetic import Arithmetic\n\n\nclass Other(Arithmetic):\n"
        "    def prompt(self, task):\n        return [{'role': 'user', 'content': 'Another question?'}]\n"
    )
    found = rescore(tmp_path / "a", [f"env.id={other}:Other"], console=Console(quiet=True))
    assert found.evaluation.n == 0 and any("is not that of the transcript" in text for text in found.failures)


async def test_every_form_is_written_and_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    await run_once(tmp_path / "a", "eval.samples=2")
    out = io.StringIO()
    console = Console(file=out, width=200)
    for form in FORMS:
        assert export(tmp_path / "a", form, None, console)
    assert export(tmp_path / "a", "leaderboard", None, console) is None
    assert "| m | arithmetic digit\\_reward=0.5 | accuracy |" in out.getvalue()
    page = (tmp_path / "a" / "report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page
    assert "cut answers</td><td>0 of 12" in page and "4 invalid:" in page and "APIStatusError" in page
    assert "http://" not in page.replace("http://127.0.0.1", "") and "more characters]" in page and "<svg" in page
    report = (tmp_path / "a" / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("| accuracy")]
    assert len(rows) == 1 and rows[0].count("|") == 7, "value, interval, invalid and both bounds"
    from datasets import load_from_disk

    table = load_from_disk(str(tmp_path / "a" / "dataset"))
    assert len(table) == 16 and json.loads(table[0]["messages"])["assistant"][0]["role"] == "user"
    (log_file,) = (tmp_path / "a" / "inspect").iterdir()
    log = json.loads(log_file.read_text())
    assert is_listed(log_file) and f"inspect view --log-dir {log_file.parent}" in out.getvalue()
    export(tmp_path / "a", "inspect", tmp_path / "mine.json", console)
    assert (
        "does not list it: want a folder" in out.getvalue() and json.loads((tmp_path / "mine.json").read_text()) == log
    )
    assert log["version"] == 2 and len(log["samples"]) == 16
    assert (
        sum("error" in one for one in log["samples"])
        == log["results"]["total_samples"] - log["results"]["completed_samples"]
    )
    with pytest.raises(UserError, match="--to htm: unknown, did you mean 'html'"):
        export(tmp_path / "a", "htm", None, console)
    with pytest.raises(UserError, match="no finished evaluation"):
        export(tmp_path, "html", None, console)
