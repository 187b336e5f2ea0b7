"""The folder of an evaluation says what was measured with what, and is read by later versions and after damage."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

import agentrl
from agentrl.config.errors import UserError
from agentrl.evaluate.compare import compare
from agentrl.evaluate.stored import StoredEpisodes
from agentrl.launch.exported import FORMS, LEADERBOARD, export
from agentrl.launch.rescore import rescore
from tests.launch.test_evaluation_api import Api, evaluated, refusal
from tests.launch.test_evaluation_resumes import with_usage

QUIET = Console(quiet=True)


async def test_an_evaluation_notes_versions_git_state_and_command(tmp_path: Path) -> None:
    _, _, result = await evaluated(Api(), tmp_path, "eval.tasks=2")
    assert result["agentrl"] == agentrl.__version__
    (tmp_path / "result.json").unlink()
    await evaluated(Api(), tmp_path, "eval.tasks=2", resume=True)
    starts = json.loads((tmp_path / "about.json").read_text())["starts"]
    assert len(starts) == 2 and starts[0]["packages"]["openai"] and starts[0]["machine"]["cores"] > 0
    assert {"command", "git", "python", "agentrl"} <= starts[1].keys()


async def test_the_set_up_is_what_was_sent(tmp_path: Path) -> None:
    """``temperature=null`` is not greedy, and the limit is that of the option; reports say so."""
    options = "inference.options={max_completion_tokens: 77, temperature: null}"
    _, text, result = await evaluated(Api(), tmp_path, "eval.tasks=2", options)
    assert (result["setup"]["temperature"], result["setup"]["max_new_tokens"]) == (None, 77)
    assert "the API's own temperature, up to 77 tokens an answer" in " ".join(text.split())
    for form in FORMS:
        export(tmp_path, form, None, QUIET)
    out = io.StringIO()
    export(tmp_path, LEADERBOARD, None, Console(file=out, width=200))
    assert "| its own |" in out.getvalue() and "own temperature" in (tmp_path / "report.html").read_text()
    assert "own temperature" in (tmp_path / "report.md").read_text()
    (tmp_path / "b").mkdir()
    none = "inference.options={max_tokens: null}"
    _, text, result = await evaluated(Api(), tmp_path / "b", "eval.tasks=2", none)
    assert result["setup"]["max_new_tokens"] is None and "the API's own limit of an answer" in " ".join(text.split())


async def test_damaged_lines_and_keys_of_other_versions_keep_no_report_from_being_made(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    await evaluated(Api(), folder, "eval.tasks=6", "rollout.max_concurrent=1")
    path = folder / "eval-episodes.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "gone": 1})
    lines[1] = lines[1][:50]
    lines[2] = json.dumps({"group_id": "eval0-2"})
    lines[3] = json.dumps([lines[3]])
    path.write_text("\n".join(lines) + '\n{"group_id": "eval0-5", "in')
    assert [one.group_id for one in StoredEpisodes(folder)] == ["eval0-0", "eval0-4", "eval0-5"]
    for form in FORMS:
        export(folder, form, None, QUIET)
    assert rescore(folder, console=QUIET).evaluation.n == 3
    lines[4] = json.dumps({**json.loads(lines[4]), "trajectories": {"assistant": {"nodes": [{"new": 1}]}}})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="is of another version of agentrl, or damaged"):
        list(StoredEpisodes(folder))


@pytest.mark.parametrize("content", ['{"eval/n": 3}', "{", "[]", '{"setup": {"model": "m", "env": {"id": "x"}}}'])
def test_a_result_of_an_older_version_is_refused_in_words(content: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    for form in [*FORMS, LEADERBOARD]:
        told = "holds no episodes" if form == "datasets" else r"result.json is of another version of agentrl"
        with pytest.raises(UserError, match=told):
            export(tmp_path, form, None, QUIET)
    with pytest.raises(UserError, match="holds no scores of an evaluation"):
        compare(tmp_path, tmp_path)


async def test_what_failed_attempts_cost_counts_after_a_resume(tmp_path: Path) -> None:
    """The second turn of each conversation fails: its first answer was paid for, and is asked for again."""
    bad = True

    def reply(number: int, body: dict[str, Any]) -> web.Response:
        if bad and len(body["messages"]) > 1:
            return refusal(418)
        return with_usage(prompt_tokens=30, completion_tokens=20)

    own = ("env.id=retry", "env.kwargs={}", "eval.tasks=4", "rollout.max_concurrent=1", "eval.max_total_tokens=100000")
    _, _, result = await evaluated(Api(reply), tmp_path, *own)
    assert result["eval/invalid"] == 4 and result["spent"]["tokens"] == 4 * 50
    bad, again = False, Api(reply)
    _, _, result = await evaluated(again, tmp_path, *own, resume=True)
    assert result["eval/invalid"] == 0 and result["spent"]["tokens"] == 4 * 50 + 50 * len(again.requests)


async def test_a_report_in_markdown_holds_no_links_and_images_of_a_text(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2", "tag": "![x](http://evil) & <b>"}) + "\n")
    folder = tmp_path / "a"
    folder.mkdir()
    await evaluated(Api(), folder, f"valid_dataset.name={rows}", "eval.tasks=1")
    export(folder, "markdown", None, QUIET)
    assert "## !\\[x\\](http://evil) &amp; &lt;b>" in (folder / "report.md").read_text()
