"""Any OpenAI-compatible API: what it is sent, and what is recorded."""

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.inference.backend import InferenceError
from agentrl.inference.kinds.kind import TextApi, server_kind
from agentrl.inference.random_streams import stream_seed

ANSWER = {
    "id": "x", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}],
}  # fmt: skip


async def test_the_key_comes_from_the_environment_and_the_record_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], json.loads(await request.read())))
        return web.json_response(ANSWER if len(seen) == 1 else {**ANSWER, "choices": []})

    monkeypatch.setenv("SOME_KEY", "secret")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        defaults = {"temperature": 0.5, "max_tokens": 7}
        client = server_kind("openai").text_client(TextApi(url, "m", "SOME_KEY", 5.0, defaults))
        llm, release = client.acquire(evaluation=True, seed=3)
        session = llm.session()
        await session.chat.completions.create(messages=[{"role": "user", "content": "6 * 7?"}], max_tokens=9)
        with pytest.raises(InferenceError, match=r"/v1/chat/completions: the answer holds no choices"):
            await session.chat.completions.create(messages=[{"role": "user", "content": "again"}])
        release()
    key, sent = seen[0]
    assert key == "Bearer secret"
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0.5, 9)
    assert sent["seed"] == stream_seed(3, 3, "assistant", 0)
    nodes = session.trajectory.nodes
    assert [node.message["content"] for node in nodes] == ["6 * 7?", "42"]
    assert not any(node.token_ids for node in nodes) and session.last_sampled == 1


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_a_failure_names_the_address_that_was_asked(end: str) -> None:
    app = web.Application()
    async with TestServer(app) as server:
        base = str(server.make_url("/")).rstrip("/")
        client = server_kind("openai").text_client(TextApi(f"{base}{end}", "m", "SOME_KEY", 5.0, {}))
        llm, release = client.acquire(evaluation=True, seed=3)
        with pytest.raises(InferenceError) as caught:
            await llm.session().chat.completions.create(messages=[{"role": "user", "content": "6 * 7?"}])
        release()
    assert str(caught.value).startswith(f"{base}{end.rstrip('/')}/chat/completions: NotFoundError")


SEVEN = [{"type": "thinking", "thinking": [{"type": "text", "text": "3 + 4"}]}, {"type": "text", "text": "7"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"content": SEVEN}, {"content": "7", "reasoning_content": "3 + 4"}),
        ({"content": [{"type": "text", "text": "7"}], "tool_calls": []}, {"content": "7"}),
        ({"content": None, "refusal": "I will not."}, {"content": "I will not."}),
        ({"content": None, "tool_calls": [CALL]}, {"content": ""}),
    ],
)
async def test_an_answer_is_read_and_recorded_as_its_text(said: dict[str, Any], read: dict[str, Any]) -> None:
    reply, session = await answered(said)
    message = reply.choices[0].message.model_dump(exclude_none=True)
    for key, value in read.items():
        assert message[key] == value
    assert "refusal" not in message
    if said.get("tool_calls"):
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    recorded = session.trajectory.nodes
    assert [node.message["content"] for node in recorded] == ["6 and 7?", read["content"]]
    assert recorded[-1].message == message


async def test_an_answer_that_is_no_text_is_a_failure_of_the_server() -> None:
    with pytest.raises(InferenceError, match=r"/chat/completions: the answer cannot be read: .*'image_url'"):
        await answered({"content": [{"type": "image_url", "image_url": {"url": "x"}}]})


async def answered(said: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the message that an agent gets from an API's answer, and its session."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **said}}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({**ANSWER, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        client = server_kind("openai").text_client(TextApi(str(server.make_url("/v1")), "m", "SOME_KEY", 5.0, {}))
        llm, release = client.acquire(evaluation=True, seed=3)
        session = llm.session()
        parts = [{"type": "text", "text": "6 and "}, {"type": "text", "text": "7?"}]
        reply = await session.chat.completions.create(messages=[{"role": "user", "content": parts}])
        release()
    return reply, session
