"""The SGLang backend against a scripted server on a real socket: requests, spans, errors."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.weights import WeightManifest
from agentrl.inference.backend import ContextOverflow, InferenceError, SamplingParams, ServerUnreachable
from agentrl.inference.sglang import SGLangBackend

Handler = Callable[[str, bytes], web.Response]
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, stop=("x",), seed=3)


@asynccontextmanager
async def backend(handler: Handler, *, embedded: bool = True, timeout: float = 5.0) -> AsyncIterator[SGLangBackend]:
    """A backend whose server answers every path with ``handler(path, body)``."""

    async def answer(request: web.Request) -> web.Response:
        return handler(request.path, await request.read())

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        made = SGLangBackend(f"{server.make_url('')}", timeout, embedded=embedded)
        try:
            yield made
        finally:
            await made.close()


def meta(**more: object) -> dict[str, object]:
    pairs = [[-0.5, 11, None], [-0.25, 12, None], [-1.0, 13, None]]
    return {"finish_reason": {"type": "stop", "matched": 13}, "output_token_logprobs": pairs, **more}


async def test_generation_has_ids_logprobs_and_a_version_per_token() -> None:
    seen: list[tuple[str, Any]] = []
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]

    def handler(path: str, body: bytes) -> web.Response:
        seen.append((path, json.loads(body)))
        return web.json_response({"output_ids": [11, 12, 13], "meta_info": meta(weight_versions=spans)})

    async with backend(handler) as server:
        result = await server.generate([1, 2], PARAMS, request_id="r")
    assert (result.token_ids, result.logprobs) == ([11, 12, 13], [-0.5, -0.25, -1.0])
    assert (result.versions, result.finish_reason) == ([4, 5, 5], "stop")
    ((path, sent),) = seen
    assert path == "/generate"
    assert sent["input_ids"] == [1, 2]
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop": ["x"], "sampling_seed": 3,
    }  # fmt: skip


async def test_an_older_server_without_spans_gives_its_one_version() -> None:
    async with backend(lambda path, body: web.json_response({"meta_info": meta(weight_version="9")})) as server:
        assert (await server.generate([1], PARAMS, request_id="r")).versions == [9, 9, 9]


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (500, "boom", InferenceError, r"http://127\.0\.0\.1:\d+/generate answered 500: boom"),
        (400, "longer than the context length", ContextOverflow, "context length"),
        (200, "<html>", InferenceError, "expected JSON"),
        (200, '{"choices": []}', InferenceError, "not SGLang's"),
    ],
)
async def test_a_wrong_answer_is_one_error_with_the_url(
    status: int, body: str, error: type[Exception], text: str
) -> None:
    async with backend(lambda path, _: web.Response(status=status, text=body)) as server:
        with pytest.raises(error, match=text):
            await server.generate([1], PARAMS, request_id="r")


async def test_an_unreachable_server_is_an_error_with_the_url_and_neither_ready_nor_alive() -> None:
    server = SGLangBackend("http://127.0.0.1:9", 5.0)  # the discard port: nobody listens
    assert not await server.ready() and not await server.alive()
    with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:9/generate: ClientConnectorError") as caught:
        await server.generate([1], PARAMS, request_id="r")
    assert caught.value.never_sent
    await server.close()


async def test_a_url_that_is_none_is_an_error() -> None:
    server = SGLangBackend("127.0.0.1:x", 5.0)
    with pytest.raises(InferenceError, match="want http://HOST:PORT"):
        await server.generate([1], PARAMS, request_id="r")
    await server.close()


async def test_a_generation_is_never_sent_twice_and_a_read_may_be() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(path)
        raise ConnectionResetError  # the server breaks off

    async with backend(handler) as server:
        with pytest.raises(InferenceError):
            await server.generate([1], PARAMS, request_id="r")
        assert seen == ["/generate"]


async def test_verify_names_the_tensors_that_differ() -> None:
    manifest = WeightManifest(
        version=2, path="/x", transport="disk", dtype="F32", nbytes=8, fingerprints={"a": "1", "b": "2", "c": "3"}
    )
    async with backend(lambda path, body: web.json_response({"fingerprints": {"a": "1", "b": "0"}})) as server:
        assert await server.verify(manifest) == ["b", "c"]
    async with backend(lambda path, body: web.json_response({"weight_version": "1"}), embedded=False) as other:
        assert await other.verify(manifest) == ["weight_version"]
