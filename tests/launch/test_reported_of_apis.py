"""Bugs that were reported of clients of APIs: filters, finish reasons, histories and calls of their own kinds."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from agentrl.config.load import load_recipe
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal, run

FILTERS: list[tuple[int, dict[str, Any]]] = [
    # UKGovernmentBEIS/inspect_ai#1750, microsoft/PyRIT#1463, UKGovernmentBEIS/inspect_ai#3420
    (400, {"message": "Invalid prompt: your prompt was flagged as potentially violating our usage policy.",
           "type": "invalid_request_error", "param": None, "code": "invalid_prompt"}),
    (400, {"message": "Invalid prompt: we've limited access to this content for safety reasons.",
           "code": "invalid_prompt"}),
    (400, {"message": "Output blocked by content filtering policy", "type": "invalid_request_error"}),
    # UKGovernmentBEIS/inspect_ai#2267: a refusal with the status of a missing permission
    (403, {"message": "Content violates usage guidelines. Failed check: SAFETY_CHECK_TYPE_BIO"}),
    # 666ghj/BettaFish#108, camel-ai/owl#432, QwenLM/qwen-code#2905
    (400, {"message": "Content Exists Risk", "type": "invalid_request_error", "code": "invalid_request_error"}),
    (400, {"code": "data_inspection_failed", "message": "Input data may contain inappropriate content."}),
    (400, {"message": "<400> InternalError.Algo.DataInspectionFailed: Input text data may contain ..."}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.api_calls.FIRST_WAIT", 0.02)


async def test_each_apis_way_of_filtering_a_prompt_costs_one_answer_and_is_counted(tmp_path: Path) -> None:
    """Two of them ended the whole command, the others made the task invalid."""

    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        if number % 2:
            return None
        status, error = FILTERS[number // 2 - 1]
        return web.json_response({"error": error} if number % 4 else error, status=status)

    tasks = 2 * len(FILTERS) + 1
    code, text, result = await evaluated(Api(reply), tmp_path, f"eval.tasks={tasks}", "rollout.max_concurrent=1")
    assert code == 0 and (result["eval/n"], result["eval/invalid"]) == (tasks, 0), text
    assert result["answers"]["filtered"] == len(FILTERS)


async def test_an_account_that_was_flagged_ends_the_command(tmp_path: Path) -> None:
    """It is no filter of one prompt: each further request would meet it."""
    api = Api(lambda number, body: refusal(403, message="Your account was flagged for review"))
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=30", "rollout.max_concurrent=1")
    assert code == 1 and "Your account was flagged" in text and len(api.requests) <= 2


async def test_finish_reasons_of_other_apis_are_read_as_openais(tmp_path: Path) -> None:
    """UKGovernmentBEIS/inspect_ai#5189 and others: an answer that was cut looked whole."""
    said = ["max_tokens", "MAX_TOKENS", "model_length", "SAFETY", "content_filter: PROHIBITED_CONTENT", "eos", "stop"]
    api = Api(lambda number, body: answer(said[number - 1]))
    _, _, result = await evaluated(api, tmp_path, f"eval.tasks={len(said)}", "rollout.max_concurrent=1")
    assert (result["answers"]["cut"], result["answers"]["filtered"]) == (3, 2)
    assert result["eval/truncated"] == pytest.approx(3 / 7)


async def test_an_answer_that_its_provider_broke_off_is_asked_for_again(tmp_path: Path) -> None:
    api = Api(lambda number, body: answer("network_error") if number == 2 else None)
    code, _, result = await evaluated(api, tmp_path, "eval.tasks=3", "rollout.max_concurrent=1")
    assert code == 0 and (result["eval/n"], len(api.requests)) == (3, 4)


async def calculated(api: Api, folder: Path, *settings: str) -> tuple[int, str, dict[str, Any]]:
    """The same as ``evaluated``, of an environment with a tool."""
    out = io.StringIO()
    async with api.serving() as url:
        own = ["trainer.type=null", "inference.engine=openai", f"inference.urls=['{url}']", "inference.model=m"]
        recipe = load_recipe("calculator_grpo", [*own, "rollout.max_concurrent=1", *settings], device="cpu")
        code = await asyncio.to_thread(run, recipe, folder, Console(file=out, width=160))
    return code, out.getvalue(), json.loads((folder / "result.json").read_text())


def called(arguments: Any = '{"expression": "1 + 1"}', **more: Any) -> web.Response:
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return answer("tool_calls", content=None, tool_calls=[call], **more)


UNSUPPORTED = (
    # janhq/jan#8136, CherryHQ/cherry-studio#16790, OpenMinis/OpenMinis#87
    (400, {"error": {"message": "'messages.3' : for 'role:assistant' the following must be satisfied[('messages.3' : "
                     "property 'reasoning_content' is unsupported)]", "type": "invalid_request_error"}}),
    (400, {"message": "messages.2.assistant.reasoning_content: property 'messages.2.assistant.reasoning_content' is "
           "unsupported", "param": "validation_error", "code": "wrong_api_format"}),
    (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "messages", 3, "assistant", "reasoning_content"],
                       "msg": "Extra inputs are not permitted", "input": "so"}]}),
)  # fmt: skip


@pytest.mark.parametrize(("status", "body"), UNSUPPORTED)
async def test_thoughts_that_an_api_refuses_in_the_history_are_left_out_there(
    status: int, body: dict[str, Any], tmp_path: Path
) -> None:
    def reply(number: int, sent: dict[str, Any]) -> web.Response | None:
        last = sent["messages"][-1]
        if last["role"] == "user":
            return called(reasoning="so", annotations=[{"a": 1}])
        if any("reasoning_content" in message for message in sent["messages"]):
            return web.json_response(body, status=status)
        return answer(content=last["content"])

    api = Api(reply)
    code, text, result = await calculated(api, tmp_path, "eval.tasks=3")
    assert code == 0 and (result["eval/n"], len(api.requests)) == (3, 7), text
    assert any("refuses reasoning_content in the messages" in note for note in result["notes"])
    kept = (tmp_path / "eval-episodes.jsonl").read_text().count('"reasoning_content":"so"')
    assert kept == 3, "the record has them"


async def test_thoughts_are_passed_back_to_an_api_that_wants_them(tmp_path: Path) -> None:
    """QuantumNous/new-api#4806 and others: each second call of DeepSeek's thinking models was refused."""
    wants = "The `reasoning_content` in the thinking mode must be passed back to the API."

    def reply(number: int, sent: dict[str, Any]) -> web.Response:
        last = sent["messages"][-1]
        if last["role"] == "user":
            return called(reasoning_content="so")
        if sent["messages"][-2].get("reasoning_content") != "so":
            return refusal(400, message=wants, type="invalid_request_error", param=None)
        return answer(content=last["content"])

    code, text, result = await calculated(Api(reply), tmp_path, "eval.tasks=2")
    assert code == 0 and result["eval/n"] == 2, text


@pytest.mark.parametrize("arguments", ["", None, " ", "null", "[]", "{", '"{}"', "{}"])
async def test_calls_with_empty_or_broken_arguments_end_no_episode(arguments: Any, tmp_path: Path) -> None:
    """microsoft/autogen#5666, langchain-ai/langchain#34242: they raised; here the model is told."""
    api = Api(lambda number, sent: answer(content="4") if sent["messages"][-1]["role"] == "tool" else called(arguments))
    code, text, result = await calculated(api, tmp_path, "eval.tasks=1")
    assert code == 0 and (result["eval/n"], len(api.requests)) == (1, 2), text
    assert "calculate" in api.requests[1]["messages"][-1]["content"]
