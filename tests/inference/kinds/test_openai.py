"""Any OpenAI-compatible API: what it is sent, and what is recorded."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.images import data_url
from agentrl.core.message_shape import MessageError
from agentrl.inference.backend import InferenceError
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.kinds.kind import TextApi, server_kind
from agentrl.inference.random_streams import stream_seed
from tests.tiny_vision import picture

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
    assert [node.message["content"] for node in nodes] == ["6 * 7?", "42", "again"]
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


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
NAMED = [{**CALL, "id": f"c{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(2)]
USER = {"role": "user", "content": "go"}


@asynccontextmanager
async def serving(*answers: Any) -> AsyncIterator[tuple[EpisodeLLM, Callable[[], None], list[dict[str, Any]]]]:
    """A handle on an API that gives these answers in turn, its release, and the requests that it got."""
    sent: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(json.loads(await request.read()))
        found = answers[len(sent) - 1]
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/json")
        return web.json_response(found)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        client = server_kind("openai").text_client(TextApi(str(server.make_url("/v1")), "m", "SOME_KEY", 5.0, {}))
        llm, release = client.acquire(evaluation=True, seed=3)
        yield llm, release, sent  # type: ignore[misc]
        release()


def choices(*messages: dict[str, Any]) -> dict[str, Any]:
    found = [{"index": i, "finish_reason": "stop", "message": one} for i, one in enumerate(messages)]
    return {**ANSWER, "choices": found, "usage": USAGE}


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_gives_the_whole_answer_and_the_record_has_it(usage: bool) -> None:
    said = {"role": "assistant", "content": "look", "tool_calls": NAMED}
    async with serving(choices(said)) as (llm, _, sent):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await llm.session().chat.completions.create(messages=[USER], stream=True, **options)
        chunks = [chunk async for chunk in stream]
    assert not {"stream", "stream_options"} & set(sent[0])
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert text == "look" and [(call.index, call.function.name) for call in calls] == [(0, "f0"), (1, "f1")]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "stop"]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == ([5] if usage else [])
    nodes = llm.trajectories()["assistant"].nodes
    assert [node.message["role"] for node in nodes] == ["user", "assistant"]
    assert nodes[1].message["content"] == "look" and nodes[1].message["tool_calls"] == NAMED


async def test_a_stream_of_an_answer_that_leaves_fields_out_is_readable() -> None:
    bare = {"choices": [{"finish_reason": "eos", "message": {"role": "assistant", "content": "42"}}]}
    async with serving(bare) as (llm, _, _sent):
        stream = await llm.session().chat.completions.create(messages=[USER], stream=True)
        assert "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices]) == "42"


async def test_each_of_n_answers_is_a_branch_and_a_conversation_goes_on_from_the_chosen_one() -> None:
    """As a training session records it."""
    first = choices(*({"role": "assistant", "content": text} for text in ("a", "b", "a")))
    second, third = choices({"role": "assistant", "content": "end"}), choices({"role": "assistant", "content": "new"})
    async with serving(first, second, third) as (llm, _, _sent):
        create = llm.session().chat.completions.create
        reply = await create(messages=[USER], n=3)
        chosen = reply.choices[1].message.model_dump(exclude_none=True)
        llm.reward(0.5, message=chosen)
        await create(messages=[USER, chosen, {"role": "user", "content": "on"}])
        await create(messages=[USER], tools=[CALL])
    nodes = llm.trajectories()["assistant"].nodes
    assert [(node.message["content"], node.parent) for node in nodes] == [
        ("go", None), ("a", 0), ("b", 0), ("a", 0), ("on", 2), ("end", 4), ("go", None), ("new", 6),
    ]  # fmt: skip
    assert [node.reward for node in nodes][:4] == [None, None, 0.5, None]


async def test_images_are_sent_in_openais_form_whatever_form_they_come_in(tmp_path: Path) -> None:
    """A local path means nothing to an API, and ``image`` is transformers' word."""
    file = tmp_path / "a.png"
    picture().save(file)
    url, fetched = data_url(file), "https://example.org/a.png"
    parts = [
        {"type": "image_url", "image_url": {"url": str(file), "detail": "low"}},
        {"type": "image", "image": picture()},
        {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        {"type": "input_image", "image_url": fetched, "detail": "high"},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "text", "text": "what?"},
    ]
    said = choices({"role": "assistant", "content": "a"})
    async with serving(said, said) as (llm, _, sent):
        create = llm.session().chat.completions.create
        await create(messages=[{"role": "user", "content": parts}])
        await create(messages=[{"role": "user", "content": parts[:2]}])
        with pytest.raises(MessageError, match=r"the tool message: the image .*none\.png cannot be read"):
            lost = {"type": "image", "image": str(tmp_path / "none.png")}
            await create(messages=[{"role": "tool", "content": [lost]}])
    shown = {"type": "image_url", "image_url": {"url": url}}
    assert sent[0]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, shown, shown,
        {"type": "image_url", "image_url": {"url": fetched, "detail": "high"}}, *parts[4:],
    ]  # fmt: skip
    nodes = llm.trajectories()["assistant"].nodes
    assert nodes[0].message["content"][3]["image_url"]["url"] == fetched
    assert nodes[2].message["content"] == [shown, shown], "as a training session records it"


@pytest.mark.parametrize("body", [b"{", b'{"choices": [{"message": {"content": "\xff"}}]}', b"[]", b'"\xe2\x80"'])
async def test_an_answer_that_is_no_json_is_a_failure_of_the_server(body: bytes) -> None:
    async with serving(body, body, body, body) as (llm, _, _sent):
        with pytest.raises(InferenceError, match="/chat/completions: "):
            await llm.session().chat.completions.create(messages=[USER])


async def test_half_a_surrogate_pair_is_replaced_in_what_is_sent_and_in_what_is_answered() -> None:
    half = b'{"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "x\\ud83d"}}]}'
    async with serving(half) as (llm, _, sent):
        ask = {"role": "user", "content": "y\ud83d", "name\ud83d": "z"}
        reply = await llm.session("white\ud83d").chat.completions.create(messages=[ask], stop=["\ud83d"])
    assert reply.choices[0].message.content == "x\ufffd"
    assert sent[0]["messages"] == [{"role": "user", "content": "y\ufffd", "name\ufffd": "z"}]
    assert sent[0]["stop"] == ["\ufffd"] and list(llm.trajectories()) == ["white\ufffd"]


async def test_a_call_after_the_episodes_end_is_refused_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.inference.client.REFUSAL_SECONDS", 0.0)
    async with serving(ANSWER, ANSWER) as (llm, release, sent):
        session = llm.session()
        await session.chat.completions.create(messages=[USER])
        release()
        with pytest.raises(InferenceError, match="the episode is over"):
            await session.chat.completions.create(messages=[USER])
        with pytest.raises(InferenceError, match="the episode is over"):
            llm.reward(1.0)
    assert len(sent) == 1 and len(llm.trajectories()["assistant"].nodes) == 2


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
