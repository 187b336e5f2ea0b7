"""Addresses, models, keys, rows and disks that cannot work are told in a line that says what to do."""

import asyncio
import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.config.errors import UserError
from agentrl.core.whole_lines import WholeLines
from agentrl.evaluate import stored
from agentrl.launch import evaluation
from tests.launch.test_evaluation_api import Api, answer, evaluated, refusal

KEY = "sk-verysecret-0123456789"


async def listed(request: web.Request) -> web.Response:
    return web.json_response(
        {"object": "list", "data": [{"id": name, "object": "model"} for name in ("small", "large")]}
    )


async def test_a_model_that_the_api_lacks_is_told_with_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(lambda number, body: refusal(404, message="The model `m` does not exist"))
    add_post = web.UrlDispatcher.add_post

    def with_list(self: web.UrlDispatcher, path: str, handler: Any) -> Any:
        self.add_get("/v1/models", listed)
        return add_post(self, path, handler)

    monkeypatch.setattr(web.UrlDispatcher, "add_post", with_list)
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=50", "rollout.max_concurrent=2")
    assert code == 1 and "its models: small, large" in " ".join(text.split()) and len(api.requests) <= 4


async def test_an_address_that_is_no_api_ends_the_command(tmp_path: Path) -> None:
    def page(number: int, body: dict[str, Any]) -> web.Response:
        return web.Response(text="<html>Welcome</html>", content_type="text/html")

    for number, reply in enumerate((page, lambda number, body: refusal(404, message="Not Found"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        api = Api(reply)
        code, text, _ = await evaluated(api, folder, "eval.tasks=50", "rollout.max_concurrent=2")
        assert code == 1 and "Its URL goes up to and including /v1" in " ".join(text.split())
        assert len(api.requests) <= 8


async def test_a_missing_key_is_told_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    api = Api(lambda number, body: refusal(401, message="You didn't provide an API key"))
    code, text, _ = await evaluated(api, tmp_path, "eval.tasks=5", "inference.api_key_env=MY_KEY")
    assert code == 1 and "$MY_KEY holds no key" in text


async def test_a_key_that_the_api_repeats_is_in_no_file_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    replies = [
        refusal(500, message=f"upstream refused {KEY}"),
        refusal(418, message=f"teapot for {KEY}", param=KEY),
        answer(),
        refusal(401, message=f"Incorrect API key provided: {KEY}"),
    ]
    api = Api(lambda number, body: replies[min(number, 4) - 1])
    settings = ("eval.tasks=8", "rollout.max_concurrent=1", "inference.api_key_env=MY_KEY")
    with caplog.at_level(logging.DEBUG, logger="agentrl"):
        code, text, _ = await evaluated(api, tmp_path, *settings)
    assert code == 1 and "[API key]" in text
    written = [text, caplog.text, *(file.read_text() for file in tmp_path.rglob("*") if file.is_file())]
    assert len(written) > 5 and not any(KEY in one for one in written)


async def test_options_are_sent_as_keys_and_a_refused_one_is_told_with_its_key(tmp_path: Path) -> None:
    options = "inference.options={max_completion_tokens: 77, temperature: null, extra_body: {top_k: 20}}"
    api = Api()
    code, _, result = await evaluated(api, tmp_path, "eval.tasks=2", options)
    sent = api.requests[0]
    assert code == 0 and (sent["max_completion_tokens"], sent["top_k"]) == (77, 20)
    assert "max_tokens" not in sent and "temperature" not in sent and "options" in result["setup"]
    api = Api(lambda number, body: refusal(400, message="unknown field", param="top_k"))
    _, text, _ = await evaluated(api, tmp_path, "eval.tasks=2", options)
    assert "inference.options.extra_body.top_k sets it" in " ".join(text.split())
    with pytest.raises(UserError, match=r"inference\.options is for external APIs"):
        from agentrl.config.load import load_recipe
        from agentrl.launch.server_checks import check_servers

        check_servers(load_recipe("arithmetic_grpo", ["trainer.type=null", "inference.options.seed=3"]))


async def test_a_verifier_that_raises_on_some_rows_makes_them_invalid_with_its_first_traceback(tmp_path: Path) -> None:
    rows = [{"question": f"What is {one} + 1?", "answer": "none" if one % 4 == 0 else str(one + 1)} for one in range(8)]
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text, result = await evaluated(Api(), tmp_path, f"valid_dataset.name={table}", "eval.tasks=8")
    assert code == 1 and (result["eval/n"], result["eval/invalid"]) == (6, 2)
    assert "2 invalid" in text and "reference_number" in text and "the reference answer 'none' has no number" in text


async def test_messages_of_ten_megabytes_are_judged_and_resumed(tmp_path: Path) -> None:
    api = Api(lambda number, body: answer(content="x" * 10_000_000 + " 42"))
    code, _, result = await evaluated(api, tmp_path, "eval.tasks=1")
    assert code == 0 and result["eval/answer_chars"] == 10_000_003
    (tmp_path / "result.json").unlink()
    again = Api()
    await evaluated(again, tmp_path, "eval.tasks=1", resume=True)
    assert not again.requests


async def test_a_full_disk_loses_lines_and_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeLines, "add", lambda self, line: False)

    def full(path: Path, found: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluation, "write_result", full)
    code, text, _ = await evaluated(Api(), tmp_path, "eval.tasks=4")
    assert code == 1 and "accuracy" in text and "result.json cannot be written: No space left" in " ".join(text.split())
    assert not (tmp_path / "result.json").exists() and stored.StoredEpisodes(tmp_path)[:] == []


async def test_cut_answers_thoughts_and_null_contents_are_judged(tmp_path: Path) -> None:
    said = [
        answer(content=None, reasoning_content="long thoughts"),
        answer(content=[{"type": "text", "text": "42"}]),
        answer("length", content="4", reasoning_content="more"),
    ]
    api = Api(lambda number, body: said[number - 1])
    code, _, result = await evaluated(api, tmp_path, "eval.tasks=3", "rollout.max_concurrent=1")
    assert code == 0 and result["eval/n"] == 3
    assert (result["answers"]["empty"], result["answers"]["cut"]) == (1, 1)


OWN_END = ("BadRequestError", "UnprocessableEntityError", "APIStatusError")
ENDS_ALL = ("AuthenticationError", "PermissionDeniedError", "NotFoundError")
REPEATED = ("ConflictError", "RateLimitError", "InternalServerError", "APIConnectionError", "APITimeoutError")
STATUS = {
    **{"BadRequestError": 400, "UnprocessableEntityError": 422, "APIStatusError": 418},
    **{"AuthenticationError": 401, "PermissionDeniedError": 403, "NotFoundError": 404},
    **{"ConflictError": 409, "RateLimitError": 429, "InternalServerError": 502},
}


@pytest.mark.parametrize("kind", [*OWN_END, *ENDS_ALL, *REPEATED])
async def test_each_error_of_the_client_has_its_end(kind: str, tmp_path: Path) -> None:
    """The second request meets it: it fails one episode, or all, or is repeated; what happened is told by its name."""
    api = Api()

    async def reply(request: web.Request) -> web.Response:
        api.requests.append(json.loads(await request.read()))
        if len(api.requests) != 2:
            return answer()
        if kind == "APIConnectionError":
            assert request.transport is not None
            request.transport.abort()
        if kind == "APITimeoutError":
            await asyncio.sleep(3600)
        return refusal(STATUS.get(kind, 500))

    api.answer = reply  # type: ignore[method-assign]
    settings = ("eval.tasks=4", "rollout.max_concurrent=1", "inference.request_timeout=1")
    code, text, result = await evaluated(api, tmp_path, *settings)
    text = " ".join(text.split())
    if kind in ENDS_ALL:
        assert code == 1 and not result and kind in text and "so far, 2 of 4 episodes" in text
    elif kind in OWN_END:
        assert (code, result["eval/n"], result["eval/invalid"], len(api.requests)) == (1, 3, 1, 4) and kind in text
    else:
        told = str(STATUS.get(kind, kind))
        assert (code, result["eval/n"], len(api.requests)) == (0, 4, 5) and f"({told}: 1)" in text
