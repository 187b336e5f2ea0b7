"""Answers that commercial APIs give beside the ordinary ones; each is taken from a public report of another tool."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.launch.server_checks import check_servers
from tests.launch.test_bad_apis import KEY
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal

# OpenRouter's body with status 200, as in UKGovernmentBEIS/inspect_ai#1534.
INSIDE = {"id": None, "choices": None, "error": {"message": "Provider returned error", "code": 429}}
CHOICE = {"index": 0, "finish_reason": "error", "message": {"role": "assistant", "content": "half"}}
HALF = {"id": "x", "choices": [{**CHOICE, "error": {"code": 502, "message": "upstream"}}]}
SUPPLIER = {"status": "FAILED", "error": "err.supplier_error"}  # EleutherAI/lm-evaluation-harness#2740


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.api_calls.FIRST_WAIT", 0.02)


async def test_an_error_inside_an_answer_with_status_200_is_repeated(tmp_path: Path) -> None:
    """The first ones too, before the address has proven that it is an API, where they name a status."""
    said = {1: INSIDE, 2: HALF, 5: SUPPLIER, 6: INSIDE}
    api = Api(lambda number, body: web.json_response(said[number]) if number in said else None)
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=4", "rollout.max_concurrent=1")
    assert code == 0 and (result["eval/n"], len(api.requests)) == (4, 8), text
    assert "429: 2" in result["notes"][0] and "502: 2" in result["notes"][0]


async def test_an_address_that_answers_with_errors_of_its_own_kind_is_no_api(tmp_path: Path) -> None:
    api = Api(lambda number, body: web.json_response(SUPPLIER))
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=50", "rollout.max_concurrent=2")
    assert code == 1 and "Its URL goes up to and including /v1" in " ".join(text.split()) and len(api.requests) <= 8


async def test_an_exhausted_account_that_is_told_inside_an_answer_ends_the_command(tmp_path: Path) -> None:
    broke = {"error": {"code": 402, "message": "Insufficient credits"}}
    api = Api(lambda number, body: web.json_response(broke))
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=50", "rollout.max_concurrent=2")
    assert code == 1 and "Insufficient credits" in text and len(api.requests) <= 4


async def test_a_model_that_refuses_both_names_of_the_limit_is_asked_without(tmp_path: Path) -> None:
    """EuroEval/EuroEval#2176: the one is refused for the other, and then the other as well."""

    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        for option in ("max_tokens", "max_completion_tokens"):
            if option in body:
                return refusal(400, message=f"Unsupported parameter: '{option}'", param=option)
        return None

    for folder, options in (("a", ()), ("b", ("inference.options={max_completion_tokens: 5}",))):
        (tmp_path / folder).mkdir()
        api = Api(reply)
        settings = ("eval.tasks=3", "rollout.max_concurrent=1", *options)
        code, text, result = await evaluated(api, tmp_path / folder, *settings)
        assert code == 0 and (result["eval/n"], len(api.requests)) == (3, 5), text
        assert "the API's own was used" in text and "inference.options.max_tokens=null" in text


async def test_an_option_of_the_recipe_that_is_refused_each_time_ends_the_command(tmp_path: Path) -> None:
    """Not the option of an agent, nor after an answer: then others may go through."""
    api = Api(lambda number, body: refusal(400, message="is too large: 9000", param="max_tokens"))
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=50", "rollout.max_concurrent=1")
    assert code == 1 and len(api.requests) == 4 and "inference.options.max_tokens sets it" in " ".join(text.split())


async def test_the_model_that_answered_is_told_where_it_is_another(tmp_path: Path) -> None:
    def reply(number: int, body: dict[str, Any]) -> web.Response:
        said = json.loads(answer().body)  # type: ignore[arg-type]
        return web.json_response({**said, "model": "m-2026-08-06"})

    _, text, result = await evaluated(Api(reply), tmp_path, "eval.tasks=3")
    assert "the API says which model answered (m-2026-08-06: 3)" in text
    assert any("m-2026-08-06" in note for note in result["notes"])


ODD: list[Any] = [
    {"choices": {"a": 1}},
    {"choices": [None]},
    {"choices": [{"index": 0}]},
    {"choices": [{"index": 0, "message": None}]},
    {"choices": [{"index": 0, "message": "text"}]},
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": 5}}]},
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": [{"type": "image_url"}]}}]},
    {"choices": [{"message": {"role": "assistant", "content": "4", "tool_calls": [{"id": 3}]}}]},
    "text",
    [],
    7,
]


async def test_answers_of_any_shape_are_the_infrastructures_failure(tmp_path: Path) -> None:
    """Between two ordinary answers: each makes one episode invalid, told as what it is, and ends nothing."""

    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        return web.json_response(ODD[number // 2 - 1]) if number % 2 == 0 else None

    tasks = 2 * len(ODD) + 1
    code, text, result = await evaluated(Api(reply), tmp_path, f"eval.tasks={tasks}", "rollout.max_concurrent=1")
    assert code == 1 and (result["eval/n"], result["eval/invalid"]) == (tasks - len(ODD), len(ODD)), text
    assert all(reason.startswith("inference_error: ") for reason in result["failures"]), result["failures"]


async def test_numbers_and_finish_reasons_of_any_shape_are_kept_and_read_again(tmp_path: Path) -> None:
    strange = {
        "id": 3,
        "choices": [{"message": {"role": "assistant", "content": "42", "reasoning": "so"}, "finish_reason": 7}],
        "usage": {"prompt_tokens": "many", "completion_tokens": -1, "prompt_tokens_details": []},
    }
    api = Api(lambda number, body: web.json_response(strange))
    _, _, result = await evaluated(api, tmp_path, "eval.tasks=2")
    assert result["eval/n"] == 2 and "eval/answer_tokens" not in result
    nodes = json.loads((tmp_path / "eval-episodes.jsonl").read_text().splitlines()[0])["trajectories"]
    assert nodes["assistant"]["nodes"][-1]["message"]["reasoning_content"] == "so"
    (tmp_path / "result.json").unlink()
    again = Api()
    await evaluated(again, tmp_path, "eval.tasks=2", resume=True)
    assert not again.requests


async def test_an_answer_that_breaks_off_is_asked_for_again(tmp_path: Path) -> None:
    """A body that is shorter than its length says, and a chunk that never comes."""
    api = Api()

    async def reply(request: web.Request) -> web.StreamResponse:
        api.requests.append(json.loads(await request.read()))
        if len(api.requests) > 2:
            return answer()
        cut = web.StreamResponse(headers={"Content-Type": "application/json"})
        if len(api.requests) == 1:
            cut.content_length = 5000
        else:
            cut.enable_chunked_encoding()
        await cut.prepare(request)
        await cut.write(b'{"id": "x", "choices": [')
        assert request.transport is not None
        request.transport.abort()
        return cut

    api.answer = reply  # type: ignore[method-assign,assignment]
    code, text, result = await evaluated(api, tmp_path, "eval.tasks=1", "rollout.max_concurrent=1")
    assert code == 0 and (result["eval/n"], len(api.requests)) == (1, 3), text
    assert "APIConnectionError: 2" in result["notes"][0]


async def test_limits_by_token_are_waited_for(tmp_path: Path) -> None:
    """OpenAI's refusals by tokens a minute name the wait in a header of milliseconds; every task is judged."""
    message = "Rate limit reached for m on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000."

    def reply(number: int, body: dict[str, Any]) -> web.Response | None:
        if number % 3:
            return None
        return refusal(429, {"retry-after-ms": "5"}, message=message, type="tokens", code="rate_limit_exceeded")

    code, _, result = await evaluated(Api(reply), tmp_path, "eval.tasks=60", "rollout.max_concurrent=32")
    assert code == 0 and (result["eval/n"], result["eval/invalid"]) == (60, 0)
    assert re.search(r"429: \d\d.*down to \d+ of 32", result["notes"][0])


async def test_a_key_that_an_answer_repeats_is_in_no_file_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a message, in a call's arguments, in a body that is no answer, and in one that is no JSON."""
    monkeypatch.setenv("MY_KEY", KEY)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"key": KEY})}}
    said = {
        2: answer(content=f"you sent Bearer {KEY}; 42", reasoning_content=KEY),
        3: answer(content="42", tool_calls=[call]),
        4: web.json_response({"echo": {"authorization": f"Bearer {KEY}"}}),
        5: web.Response(text=f"{{{KEY}", content_type="application/json"),
        6: web.json_response({"error": {"code": 400, "message": f"bad {KEY}"}}),
    }
    api = Api(lambda number, body: said.get(number))
    settings = ("eval.tasks=7", "rollout.max_concurrent=1", "inference.api_key_env=MY_KEY")
    with caplog.at_level("DEBUG", logger="agentrl"):
        _, text, result = await evaluated(api, tmp_path, *settings)
    assert (result["eval/n"], result["eval/invalid"]) == (4, 3), text
    written = [text, caplog.text, *(file.read_text() for file in tmp_path.rglob("*") if file.is_file())]
    assert len(written) > 5 and not any(KEY in one for one in written)
    assert "you sent Bearer [API key]; 42" in (tmp_path / "eval-episodes.jsonl").read_text()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("inference.urls=['http://me:secret-word@h/v1']", "inference.urls: a user's name and password"),
        ("inference.options={extra_headers: {Authorization: Bearer sk-1234567890}}", "inference.options.extra_headers"),
        ("inference.options={extra_headers: {x-api-key: sk-1234567890}}", "inference.options.extra_headers"),
    ],
)
def test_a_secret_in_the_settings_is_refused_because_settings_are_written_down(setting: str, told: str) -> None:
    own = ["trainer.type=null", "inference.engine=openai", "inference.urls=['http://h/v1']"]
    check_servers(load_recipe("arithmetic_grpo", own))
    with pytest.raises(UserError, match=re.escape(told)) as raised:
        check_servers(load_recipe("arithmetic_grpo", [*own, setting]))
    assert "inference.api_key_env" in str(raised.value) and "sk-1234567890" not in str(raised.value)
    assert "secret-word" not in str(raised.value)
