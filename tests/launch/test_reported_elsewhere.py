"""Bugs that were reported of other evaluation harnesses, tried here; each test names the report."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.launch.test_evaluation_api import Api, answer, evaluated


def counted(usage: dict[str, Any], **message: Any) -> web.Response:
    said = {"role": "assistant", "content": "42", **message}
    choice = {"index": 0, "finish_reason": "stop", "message": said}
    return web.json_response({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
                              "usage": usage})  # fmt: skip


THOUGHT = {"completion_tokens_details": {"reasoning_tokens": 94}, "prompt_tokens": 32}


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({**THOUGHT, "completion_tokens": 9, "total_tokens": 135}, 103),  # xAI: beside the answer's
        ({**THOUGHT, "completion_tokens": 103, "total_tokens": 135}, 103),  # OpenAI: among them
        ({**THOUGHT, "completion_tokens": 103}, 103),
        ({**THOUGHT, "completion_tokens": 9, "total_tokens": 41}, 9),  # it is not said that they are beside
    ],
)
async def test_thoughts_that_an_api_counts_beside_the_answer_are_paid_for(
    usage: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    """UKGovernmentBEIS/inspect_ai#5528: the cost was 8.7 times too small, and no limit was reached."""
    price = "eval.price={input: 1000, output: 1000}"
    _, _, result = await evaluated(Api(lambda number, body: counted(usage)), tmp_path, "eval.tasks=2", price)
    assert result["eval/answer_tokens"] == tokens and result["eval/reasoning_tokens"] == 94
    assert result["eval/cost"] == pytest.approx((32 + tokens) / 1000)


class Crowd(Api):
    """Answers when so many requests wait at a time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._all = size, asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(json.loads(await request.read()))
        if len(self.requests) >= self._size:
            self._all.set()
        await asyncio.wait_for(self._all.wait(), 60)
        return answer()


async def test_more_than_a_hundred_requests_are_at_the_api_at_a_time(tmp_path: Path) -> None:
    """huggingface/lighteval#1100: the client had 100 connections, whatever was set."""
    code, text, result = await evaluated(Crowd(160), tmp_path, "eval.tasks=160", "rollout.max_concurrent=160")
    assert (code, result["eval/n"]) == (0, 160), text


async def test_a_task_is_asked_for_alike_whatever_the_number_of_tasks(tmp_path: Path) -> None:
    """EleutherAI/lm-evaluation-harness#2550: answers of a task changed with --limit."""
    asked = []
    for number in (3, 8):
        folder, api = tmp_path / str(number), Api()
        folder.mkdir()
        sampled = ("sampling.eval_temperature=0.8", "rollout.max_concurrent=1")
        await evaluated(api, folder, f"eval.tasks={number}", *sampled)
        asked.append({one["messages"][-1]["content"]: one for one in api.requests})
    common = asked[0].keys() & asked[1].keys()
    assert common and all(asked[0][one] == asked[1][one] for one in common)


async def test_empty_answers_are_never_right(tmp_path: Path) -> None:
    """lupantech/MathVista#19, open-compass/opencompass#1232: empty answers earned 22 of 100."""
    said = ("", None, " \n", "####")
    api = Api(lambda number, body: answer(content=said[number % len(said)]))
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=8", "rollout.max_concurrent=2")
    assert (code, result["eval/n"], result["eval/accuracy"]) == (0, 8, 0.0), text


async def test_one_task_of_one_sample_gives_numbers_and_no_nan(tmp_path: Path) -> None:
    """openai/evals#1834, EleutherAI/lm-evaluation-harness#1106: a spread of one value was NaN, or ended the run."""
    code, text, result = await evaluated(Api(), tmp_path, "eval.tasks=1")
    assert code == 0 and "nan" not in text.lower() and "pass@1" not in text
    assert 0 <= result["eval/accuracy_low"] < result["eval/accuracy_high"] <= 1

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    for file in tmp_path.rglob("*.json*"):
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(line, parse_constant=refuse)
