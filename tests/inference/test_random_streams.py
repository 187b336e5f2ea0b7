"""The seeds that requests carry: none twice in an episode, the same ones in the same run, on each kind of server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.inference.backend import Backend, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.inference.kinds.kind import TextApi, server_kind
from agentrl.inference.kinds.sglang import SGLangBackend
from agentrl.inference.kinds.vllm import VLLMBackend
from agentrl.inference.random_streams import stream_seed
from agentrl.inference.router import Router
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate
from tests.inference.fakes import FakeBackend, answer
from tests.inference.scripted import scripted

HELLO = {"role": "user", "content": "hello"}
SETTINGS = SessionSettings(SamplingParams(max_new_tokens=20), 500, locked=True, model="m")


@pytest.fixture(scope="module")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(tiny_model)


def client_of(backend: Any, template: ChatTemplate) -> ChatClient:
    return ChatClient(Router([backend]), template, SETTINGS, replace(SETTINGS, locked=False))


def aborting(template: ChatTemplate) -> FakeBackend:
    """Aborts each answer twice, once before its first token."""
    parts = [answer([], finish="abort"), answer([5, 6], finish="abort"), answer([7, template.eos_id])]
    count = iter(range(10**6))
    return FakeBackend(lambda ids, params: parts[next(count) % 3])


async def sent_by_an_episode(template: ChatTemplate, seed: int) -> list[tuple[tuple[int, ...], int]]:
    """Prompt and seed of all requests of an episode of two roles, several turns, samples, aborts and calls at once."""
    backend = aborting(template)
    llm, release = client_of(backend, template).acquire(evaluation=True, seed=seed)
    for role in ("white", "black"):
        session = llm.session(role)
        reply = await session.chat.completions.create(messages=[HELLO], n=2, seed=4)
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        await session.chat.completions.create(messages=[HELLO, said, HELLO], seed=4)
        await asyncio.gather(*(session.chat.completions.create(messages=[HELLO], seed=4) for _ in range(2)))
    release()
    return [(tuple(ids), params.seed or 0) for ids, params in backend.requests]


async def test_no_two_requests_of_an_episode_draw_the_same_random_numbers(template: ChatTemplate) -> None:
    sent = await sent_by_an_episode(template, seed=3)
    assert len(sent) == 2 * 5 * 3
    distinct = {seed for _, seed in sent}
    assert len(distinct) == 2 * 5 * 2  # a request that was aborted before its first token is sent again as it was


async def test_the_same_episode_sends_the_same_seeds_and_another_one_sends_others(template: ChatTemplate) -> None:
    first, again, other = [await sent_by_an_episode(template, seed) for seed in (3, 3, 4)]
    assert first == again
    assert not {seed for _, seed in first} & {seed for _, seed in other}


async def test_neighbouring_episodes_have_no_request_in_common(template: ChatTemplate) -> None:
    """An evaluation's episodes have the seeds 0, 1, 2, ...: turn 2 of one must not be turn 1 of another."""
    seeds: list[int] = []
    for episode in range(8):
        backend = FakeBackend(lambda ids, params: answer([5, template.eos_id]))
        llm, _ = client_of(backend, template).acquire(evaluation=True, seed=episode)
        messages = [HELLO]
        for _ in range(6):
            reply = await llm.session().chat.completions.create(messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, HELLO]
        seeds += [params.seed or 0 for _, params in backend.requests]
    assert len(set(seeds)) == len(seeds) == 48


async def test_a_request_that_moves_to_another_server_is_sent_as_it_was(template: ChatTemplate) -> None:
    """Nothing of the lost answer is kept, so that its random numbers are still unused."""
    dead = FakeBackend(lambda ids, params: answer([]), "http://dead")
    dead.dead = True
    other = FakeBackend(lambda ids, params: answer([5, template.eos_id]), "http://other")
    router = Router([dead, other])
    llm, _ = ChatClient(router, template, SETTINGS, SETTINGS).acquire(evaluation=False, seed=3)
    await llm.session().chat.completions.create(messages=[HELLO])
    assert len(dead.requests) == 1 and dead.requests == other.requests


async def test_without_a_seed_none_is_sent(template: ChatTemplate) -> None:
    backend = aborting(template)
    await ChatSession(backend, template, SETTINGS).create(messages=[HELLO])
    assert [params.seed for _, params in backend.requests] == [None] * 3


def test_seeds_fit_31_bits_and_are_the_same_in_every_process() -> None:
    seeds = [stream_seed(number, "assistant", number % 3) for number in range(2000)]
    assert all(0 <= seed < 2**31 for seed in seeds) and len(set(seeds)) == 2000
    assert abs(sum(seeds) / len(seeds) / 2**31 - 0.5) < 0.02  # of uniform numbers: 3 standard errors
    code = "from agentrl.inference.random_streams import stream_seed; print(stream_seed(1, None, 'a'))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    elsewhere = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert int(elsewhere.stdout) == stream_seed(1, None, "a")


def sglang(meta: dict[str, Any]) -> web.Response:
    pairs = [[-0.5, token, None] for token in meta["ids"]]
    inner = {"finish_reason": {"type": meta["finish"]}, "output_token_logprobs": pairs, "weight_version": "1"}
    return web.json_response({"meta_info": inner})


def vllm(meta: dict[str, Any]) -> web.Response:
    content = [{"token_id": token, "logprob": -0.5} for token in meta["ids"]]
    spans = [{"version": "1", "start": 0, "end": len(content)}] if content else []
    choice = {"token_ids": meta["ids"], "finish_reason": meta["finish"], "logprobs": {"content": content}}
    return web.json_response({"choices": [{**choice, "weight_versions": spans}]})


@pytest.mark.parametrize(
    ("kind", "reply", "key"),
    [(EmbeddedBackend, sglang, "sampling_seed"), (SGLangBackend, sglang, "sampling_seed"), (VLLMBackend, vllm, "seed")],
)
async def test_each_kind_of_server_gets_a_new_seed_for_a_continued_answer(
    template: ChatTemplate, kind: Callable[[str, float], Backend], reply: Callable[..., web.Response], key: str
) -> None:
    found: list[list[int]] = []
    for parts in ([([5, 6], "abort"), ([7], "abort"), ([template.eos_id], "stop")], [([5], "stop")]):
        seen: list[Any] = []
        rest = iter(parts)

        def handler(path: str, body: bytes, seen: list[Any] = seen, rest: Any = rest) -> web.Response:
            seen.append(json.loads(body)["sampling_params"][key])
            ids, finish = next(rest)
            return reply({"ids": ids, "finish": finish})

        async with scripted(handler, kind) as server:
            llm, _ = client_of(server, template).acquire(evaluation=False, seed=3)
            await llm.session().chat.completions.create(messages=[HELLO])
        found.append(seen)
    aborted, whole = found
    assert len(set(aborted)) == 3
    assert aborted[:1] == whole  # an abort changes nothing of what was sampled before it


async def test_an_api_without_ids_gets_another_seed_for_each_call_and_role() -> None:
    seen: list[int] = []
    message = {"role": "assistant", "content": "42"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(json.loads(body)["seed"])
        return web.json_response(whole)

    def fake(url: str, timeout: float) -> FakeBackend:
        return FakeBackend(lambda ids, params: answer([]), url)

    async with scripted(handler, fake) as server:
        client = server_kind("openai").text_client(TextApi(f"{server.url}/v1", "m", "NO_KEY", 5.0, {}))
        for seed in (0, 0, 1):
            llm, _ = client.acquire(evaluation=True, seed=seed)
            for role in ("white", "black"):
                for given in ({}, {}, {"seed": 4}, {"seed": 4}):
                    await llm.session(role).chat.completions.create(messages=[HELLO], **given)
    assert len(set(seen)) == 16 and seen[:8] == seen[8:16]
