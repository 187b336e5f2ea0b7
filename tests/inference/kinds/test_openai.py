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
