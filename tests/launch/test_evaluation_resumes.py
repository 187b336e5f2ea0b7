"""An evaluation that was cut at any moment goes on without asking again for what is judged, and ends by its rules."""

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

import agentrl
from agentrl.config.errors import UserError
from agentrl.evaluate.judged import is_unfinished
from agentrl.evaluate.stored import StoredEpisodes
from agentrl.launch import api as launch_api
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal

LIMITS = ("eval.tasks=10", "eval.samples=2", "rollout.max_concurrent=4")


def asked(api: Api) -> list[tuple[str, int]]:
    """Prompt and seed of each request; no two attempts have both in common."""
    return [(body["messages"][-1]["content"], body["seed"]) for body in api.requests]


async def test_cut_at_twenty_random_moments_nothing_that_is_judged_is_asked_again(tmp_path: Path) -> None:
    """After ``kill -9`` the files hold what was written: a beginning of the episodes, its last line perhaps cut."""
    whole = Api()
    (tmp_path / "whole").mkdir()
    code, _, expected = await evaluated(whole, tmp_path / "whole", *LIMITS)
    assert code == 0 and len(set(asked(whole))) == 20
    content = (tmp_path / "whole" / "eval-episodes.jsonl").read_bytes()
    of_episode = {(one.group_id, one.index): one for one in StoredEpisodes(tmp_path / "whole")}
    rng = random.Random(0)
    for moment in range(20):
        folder = tmp_path / str(moment)
        folder.mkdir()
        cut = content[: rng.randrange(len(content))]
        (folder / "eval-episodes.jsonl").write_bytes(cut)
        (folder / "setup.json").write_bytes((tmp_path / "whole" / "setup.json").read_bytes())
        judged = [json.loads(line) for line in cut.split(b"\n")[:-1]]
        api = Api()
        code, text, result = await evaluated(api, folder, *LIMITS, resume=True)
        assert code == 0 and f"{len(judged)} of 20 episodes are judged" in text
        assert len(api.requests) == 20 - len(judged) == len(set(asked(api)))
        prompts = {of_episode[one["group_id"], one["index"]].conversation()[0]["content"] for one in judged}
        open_tasks = {one.conversation()[0]["content"] for one in of_episode.values()} - prompts
        assert open_tasks <= {prompt for prompt, _ in asked(api)}
        assert result["per_task"] == expected["per_task"] and result["eval/n"] == 20
        lines = (folder / "eval-episodes.jsonl").read_bytes()
        assert lines.startswith(b"".join(line + b"\n" for line in cut.split(b"\n")[:-1])), "it is only appended to"


async def test_a_damaged_line_and_one_of_an_older_version_do_not_end_a_resume(tmp_path: Path) -> None:
    await evaluated(Api(), tmp_path, *LIMITS)
    path = tmp_path / "eval-episodes.jsonl"
    lines = path.read_text().splitlines()
    older = {name: value for name, value in json.loads(lines[1]).items() if name not in ("answer", "attempt")}
    lines[1] = json.dumps({**older, "gone": 1})
    path.write_text("\n".join(["{damaged", "[1]", *lines[1:]]) + "\n")
    (tmp_path / "result.json").unlink()
    api = Api()
    code, text, _ = await evaluated(api, tmp_path, *LIMITS, resume=True)
    assert code == 0 and len(api.requests) == 1 and "19 of 20 episodes are judged; 2 lines cannot be read" in text


async def test_the_same_call_goes_on_and_another_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seconds = iter("122")  # the last two that begin anew do so in the same second
    monkeypatch.setattr(launch_api, "_own_folder", lambda what: Path(f"runs/eval-{next(seconds)}"))
    api, out = Api(), io.StringIO()
    async with api.serving() as url:

        def call(**more: Any) -> Any:
            options = {"model": "m", "base_url": url, "tasks": 6, "console": Console(file=out, width=200), **more}
            return agentrl.evaluate("arithmetic", {"sampling.max_new_tokens": 9}, **options)

        first = await asyncio.to_thread(call)
        assert first.run_dir.parent == Path("runs") and len(api.requests) == 6
        (first.run_dir / "result.json").unlink()
        path = first.run_dir / "eval-episodes.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
        again = await asyncio.to_thread(call)
        assert again.run_dir == first.run_dir and len(api.requests) == 8 and again.evaluation.n == 6
        assert f"going on in {first.run_dir}; --output NEW begins another" in out.getvalue()
        other = await asyncio.to_thread(call)
        assert other.run_dir != first.run_dir and len(api.requests) == 14, "the first is finished"
        (other.run_dir / "result.json").unlink()
        assert (await asyncio.to_thread(call, tasks=5)).run_dir != other.run_dir
        empty = tmp_path / "empty"
        empty.mkdir()
        assert is_unfinished(empty), "the process was killed before it wrote anything"
        assert (await asyncio.to_thread(call, output=empty)).evaluation.n == 6
        with pytest.raises(UserError, match="exists"):
            await asyncio.to_thread(call, output=empty)


async def test_an_interval_that_is_narrow_enough_ends_the_evaluation(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response:
        return answer(content="no")

    api = Api(reply)
    settings = ("eval.tasks=200", "eval.until_ci=0.06", "rollout.max_concurrent=4")
    code, text, result = await evaluated(api, tmp_path, *settings)
    assert code == 0 and "eval.until_ci=0.06 is reached after" in text and "episodes" in text
    shown = " ".join(text.split())
    assert "±6 points need about 278 tasks at an accuracy of 50%, 112 at 90%; there are 200: it may not" in shown
    assert len(api.requests) < 100 and result["eval/n"] == len(api.requests)
    assert 0.1 < result["eval/accuracy_high"] <= 0.12 and result["eval/accuracy_low"] == 0
    assert result["ended"].startswith("eval.until_ci=0.06") and result["until_ci_tasks"] == result["eval/n"]


def with_usage(**usage: int) -> web.Response:
    said = json.loads(answer().body)  # type: ignore[arg-type]
    return web.json_response({**said, "usage": {"total_tokens": sum(usage.values()), **usage}})


async def test_a_budget_ends_the_evaluation_and_a_resume_counts_what_was_spent(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response:
        return with_usage(prompt_tokens=30, completion_tokens=20)

    settings = ("eval.tasks=40", "rollout.max_concurrent=2")
    price = "eval.price={input: 1000, output: 10000}"
    code, text, result = await evaluated(Api(reply), tmp_path, *settings, price, "eval.max_cost=2.3")
    assert code == 0 and "eval.max_cost=2.3 is used up; 10 of 40 episodes" in text
    assert result["spent"] == {"tokens": 500, "cost": pytest.approx(2.3)} and result["eval/n"] == 10
    assert result["eval/cost"] == pytest.approx(0.23) and result["eval/answer_tokens"] == 20
    more = Api(reply)
    _, text, result = await evaluated(more, tmp_path, *settings, price, "eval.max_total_tokens=750", resume=True)
    assert len(more.requests) == 5 and result["spent"]["tokens"] == 750 and "15 of 40 episodes" in text


async def test_a_budget_of_tokens_that_an_api_does_not_tell_is_said(tmp_path: Path) -> None:
    api = Api()
    settings = ("eval.tasks=40", "rollout.max_concurrent=2", "eval.max_total_tokens=1000")
    _, text, _ = await evaluated(api, tmp_path, *settings)
    assert "the server tells no numbers of tokens" in text and len(api.requests) <= 4
    with pytest.raises(UserError, match="needs the price of m"):
        await evaluated(Api(), tmp_path, "eval.max_cost=1")


async def test_invalid_episodes_have_bounds_and_their_share_at_eighty_columns(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        return refusal(418) if number % 5 == 0 else None

    code, text, result = await evaluated(Api(reply), tmp_path, "eval.tasks=20", "rollout.max_concurrent=1")
    assert code == 1 and (result["eval/n"], result["eval/invalid"]) == (16, 4)
    right = result["eval/accuracy"] * 16
    assert result["eval/accuracy_if_wrong"] == pytest.approx(right / 20)
    assert result["eval/accuracy_if_right"] == pytest.approx((right + 4) / 20)
    assert text.count("20.0%") >= 5, "beside every number"
    assert sum(result["failures"].values()) == 4
