"""The SGLang backend against a scripted server: requests, spans, errors."""

import json
from collections.abc import Callable

import httpx
import pytest

from agentrl.core.weights import WeightManifest
from agentrl.inference.backend import ContextOverflow, InferenceError, SamplingParams
from agentrl.inference.sglang import SGLangBackend

Handler = Callable[[httpx.Request], httpx.Response]
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, stop=("x",), seed=3)


def backend(handler: Handler, *, embedded: bool = True) -> SGLangBackend:
    made = SGLangBackend("http://server/", 5.0, embedded=embedded)
    made._http = httpx.AsyncClient(base_url=made.url, transport=httpx.MockTransport(handler))
    return made


def meta(**more: object) -> dict[str, object]:
    pairs = [[-0.5, 11, None], [-0.25, 12, None], [-1.0, 13, None]]
    return {"finish_reason": {"type": "stop", "matched": 13}, "output_token_logprobs": pairs, **more}


async def test_generation_has_ids_logprobs_and_a_version_per_token() -> None:
    seen: list[httpx.Request] = []
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"output_ids": [11, 12, 13], "meta_info": meta(weight_versions=spans)})

    result = await backend(handler).generate([1, 2], PARAMS, request_id="r")
    assert (result.token_ids, result.logprobs) == ([11, 12, 13], [-0.5, -0.25, -1.0])
    assert (result.versions, result.finish_reason) == ([4, 5, 5], "stop")
    sent = json.loads(seen[0].content)
    assert sent["input_ids"] == [1, 2]
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "stop": ["x"], "sampling_seed": 3,
    }  # fmt: skip


async def test_an_older_server_without_spans_gives_its_one_version() -> None:
    server = backend(lambda request: httpx.Response(200, json={"meta_info": meta(weight_version="9")}))
    assert (await server.generate([1], PARAMS, request_id="r")).versions == [9, 9, 9]


@pytest.mark.parametrize(
    ("response", "error", "text"),
    [
        (httpx.Response(500, text="boom"), InferenceError, "http://server/generate answered 500: boom"),
        (httpx.Response(400, text="longer than the context length"), ContextOverflow, "context length"),
        (httpx.Response(200, text="<html>"), InferenceError, "expected JSON"),
        (httpx.Response(200, json={"choices": []}), InferenceError, "not SGLang's"),
    ],
)
async def test_a_wrong_answer_is_one_error_with_the_url(
    response: httpx.Response, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await backend(lambda request: response).generate([1], PARAMS, request_id="r")


async def test_an_unreachable_server_is_an_error_with_the_url_and_not_ready() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    server = backend(handler)
    assert not await server.ready()
    with pytest.raises(InferenceError, match=r"http://server/generate: ConnectError refused"):
        await server.generate([1], PARAMS, request_id="r")


async def test_verify_names_the_tensors_that_differ() -> None:
    manifest = WeightManifest(
        version=2, path="/x", transport="disk", dtype="F32", nbytes=8, fingerprints={"a": "1", "b": "2", "c": "3"}
    )
    server = backend(lambda request: httpx.Response(200, json={"fingerprints": {"a": "1", "b": "0"}}))
    assert await server.verify(manifest) == ["b", "c"]
    other = backend(lambda request: httpx.Response(200, json={"weight_version": "1"}), embedded=False)
    assert await other.verify(manifest) == ["weight_version"]
