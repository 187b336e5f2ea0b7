"""The vLLM backend against a scripted server: both ways to generate, versions, what it refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.agent import ContextOverflow
from agentrl.inference.backend import InferenceError, SamplingParams
from agentrl.inference.kinds.vllm import VLLMBackend

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, stop=("x",), stop_token_ids=(9,), seed=3)
CHOICE: dict[str, Any] = {"token_ids": [11, 12, 13], "finish_reason": "length"}
SPANS = [{"version": "4", "start": 0, "end": 3}]
Answers = dict[str, Callable[[dict[str, Any]], web.Response]]


@asynccontextmanager
async def backend(answers: Answers) -> AsyncIterator[tuple[VLLMBackend, list[tuple[str, Any]]]]:
    """A backend whose server answers the given paths, 404 to others; and what was asked."""
    seen: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else {}
        seen.append((request.path_qs, body))
        known = answers.get(request.path)
        return known(body) if known else web.Response(status=404, text="not found")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        made = VLLMBackend(f"{server.make_url('')}", 5.0)
        try:
            yield made, seen
        finally:
            await made.close()


def generated(**more: Any) -> Callable[[dict[str, Any]], web.Response]:
    content = [{"token_id": 11, "logprob": -0.5}, {"token_id": 12, "logprob": -0.25}, {"token_id": 13, "logprob": -1.0}]
    choice = {**CHOICE, "logprobs": {"content": content}, "weight_versions": SPANS, **more}
    return lambda body: web.json_response({"choices": [choice]})


def completed(body: dict[str, Any]) -> web.Response:
    return web.json_response({"choices": [{**CHOICE, "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]}}]})


OLD: Answers = {
    "/inference/v1/generate": lambda body: web.Response(status=403, text="needs --enable-scale-out"),
    "/v1/models": lambda body: web.json_response({"data": [{"id": "served"}]}),
    "/v1/completions": completed,
    "/weight_info": lambda body: web.json_response({"weight_version": "4"}),
    **{path: lambda body: web.json_response({}) for path in ("/pause", "/resume", "/collective_rpc")},
    **{path: lambda body: web.json_response({}) for path in ("/reset_prefix_cache", "/update_weight_version")},
}


async def test_ids_logprobs_and_versions_come_from_one_answer() -> None:
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    async with backend({"/inference/v1/generate": generated(weight_versions=spans)}) as (server, seen):
        result = await server.generate([1, 2], PARAMS, request_id="r")
    assert (result.token_ids, result.logprobs) == ([11, 12, 13], [-0.5, -0.25, -1.0])
    assert (result.versions, result.finish_reason) == ([4, 5, 5], "length")
    assert seen[0][1]["token_ids"] == [1, 2]
    assert seen[0][1]["sampling_params"] == {
        "max_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "logprobs": 0, "stop": ["x"],
        "stop_token_ids": [9], "seed": 3,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


async def test_scores_are_those_of_the_prompts_own_tokens() -> None:
    told = [None, {"6": {"logprob": -2.0}}, {"9": {"logprob": -0.1}, "7": {"logprob": -0.5}}, {"8": {"logprob": -0.25}}]
    answers: Answers = {
        "/v1/models": OLD["/v1/models"],
        "/v1/completions": lambda body: web.json_response({"choices": [{"text": "x", "prompt_logprobs": told}]}),
        "/inference/v1/generate": generated(),
    }
    async with backend(answers) as (server, seen):
        assert await server.score([5, 6, 7, 8], 2) == [-0.5, -0.25]
        with pytest.raises(InferenceError, match="not vLLM's"):
            await server.score([5, 6, 7, 1], 1)
        await server.generate([1], PARAMS, request_id="r")
    asked = seen[1][1]
    assert (asked["model"], asked["prompt"], asked["prompt_logprobs"]) == ("served", [5, 6, 7, 8], 0)
    assert (asked["max_tokens"], asked["temperature"]) == (1, 1.0)
    assert seen[-1][0] == "/inference/v1/generate", "scoring does not change how it generates"


async def test_without_scale_out_completions_are_asked_and_stamped_with_the_version_they_started_under() -> None:
    async with backend(OLD) as (server, seen):
        result = await server.generate([1, 2], PARAMS, request_id="r")
        assert (result.token_ids, result.versions) == ([11, 12, 13], [4, 4, 4])
        path, sent = seen[-1]
        assert path == "/v1/completions"
        assert (sent["prompt"], sent["model"], sent["return_token_ids"]) == ([1, 2], "served", True)
        # what is absent here vLLM takes from the model's generation_config.json (NeMo-RL 3497, verl 7270)
        assert (sent["repetition_penalty"], sent["min_p"], sent["top_k"], sent["top_p"]) == (1.0, 0.0, 0, 1.0)
        assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.0, 0.0)
        await server.generate([1], PARAMS, request_id="s")
        assert [path for path, _ in seen].count("/inference/v1/generate") == 1, "what is not there is asked once"


async def test_without_scale_out_no_request_is_under_way_during_a_push(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    async with backend(OLD) as (server, seen):
        await server.generate([1], PARAMS, request_id="first")
        with pytest.raises(InferenceError, match=r"--enable-scale-out, or set weights\.pause_mode=abort"):
            await server.pause("in_place")
        await server.pause("abort")
        held = asyncio.create_task(server.generate([1], PARAMS, request_id="held"))
        await server.load(str(tmp_path), 8)
        assert [path for path, _ in seen].count("/v1/completions") == 1, "a request was sent during the push"
        await server.resume()
        assert (await held).versions == [8, 8, 8]


async def test_the_modes_of_a_pause_and_what_follows_a_load(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    for mode, said, cache_kept in (("abort", "abort", False), ("retract", "keep", False), ("in_place", "keep", True)):
        async with backend(OLD) as (server, seen):
            await server.pause(mode)  # type: ignore[arg-type]
            await server.load(str(tmp_path), 8)
        paths = [path for path, _ in seen]
        assert paths[0] == f"/pause?mode={said}"
        assert ("/reset_prefix_cache?reset_running_requests=true" not in paths) == cache_kept
        assert ("/reset_prefix_cache" in paths) == cache_kept, "what no request holds is dropped in any mode"
        assert "/reset_encoder_cache" in paths, "features of images would be those of the old tower"
        assert seen[-1] == ("/update_weight_version", {"new_version": "8"})


async def test_prefixes_of_one_version_are_not_used_by_requests_of_another(tmp_path: Path) -> None:
    """A server may keep prefixes over a push (NeMo-RL 4018); a process that pushes nothing learns it from answers."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    spans = [{"version": "6", "start": 0, "end": 3}]
    for answers in ({**OLD, "/inference/v1/generate": generated(weight_versions=spans)}, OLD):
        salts = []
        async with backend(answers) as (server, seen):
            for step in range(4):
                await server.generate([1, 2], PARAMS, request_id="r")
                salts.append(seen[-1][1]["cache_salt"])
                if step == 1:
                    await server.load(str(tmp_path), 7)
                if step == 2:
                    await server.load(str(tmp_path), 3)  # the last committed one again
        assert salts == (["0", "6", "7", "3"] if answers is not OLD else ["0", "0", "7", "3"])


async def test_the_first_load_of_a_connection_starts_from_zero(tmp_path: Path) -> None:
    """Weights that vLLM leaves as they are, with a warning in its log alone, change what the first push looks at."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    for answers in (OLD, {**OLD, "/weight_checker": lambda body: web.json_response({"status": "reset"})}):
        async with backend(answers) as (server, seen):
            await server.load(str(tmp_path), 0)
            await server.load(str(tmp_path), 1)
        paths = [path for path, _ in seen]
        assert paths.count("/weight_checker") == 1 and paths.index("/weight_checker") < paths.index("/collective_rpc")
        assert ("/weight_checker", {"action": "reset"}) in seen


@pytest.mark.parametrize("path", ["/weight_checker", "/reset_encoder_cache"])
async def test_a_call_that_older_servers_lack_may_not_fail_where_it_is_known(path: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    async with backend({**OLD, path: lambda body: web.Response(status=500, text="broken")}) as (server, _):
        with pytest.raises(InferenceError, match=f"{path} answered 500"):
            await server.load(str(tmp_path), 8)


async def test_a_folder_without_weights_never_reaches_the_server(tmp_path: Path) -> None:
    async with backend(OLD) as (server, seen):
        with pytest.raises(InferenceError, match="holds no safetensors file"):
            await server.load(str(tmp_path), 8)
        assert seen == []


async def test_a_server_without_calls_for_weights_is_told_how_to_get_them() -> None:
    async with backend({}) as (server, _):
        with pytest.raises(InferenceError, match=r"has no /pause: start vLLM with VLLM_SERVER_DEV_MODE=1"):
            await server.pause("abort")
        assert await server.version() == 0


@pytest.mark.parametrize("paused", [True, False])
async def test_a_server_tells_whether_it_is_paused_if_its_flags_let_it(paused: bool) -> None:
    async with backend({"/is_paused": lambda body: web.json_response({"is_paused": paused})}) as (server, _):
        assert await server.paused() is paused
    async with backend({}) as (server, _):
        assert await server.paused() is None


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (web.Response(status=400, text="longer than the maximum model length of 512"), ContextOverflow, "512"),
        (web.Response(status=500, text="EngineCore"), InferenceError, "answered 500: EngineCore"),
        (web.Response(text="<html>"), InferenceError, "expected JSON"),
        (web.json_response({"choices": []}), InferenceError, "not vLLM's"),
        (
            web.json_response({"choices": [{**CHOICE, "logprobs": {"content": [{"logprob": -1.0}] * 3}}]}),
            InferenceError,
            "cover only 0 of 3 tokens",
        ),
        (
            web.json_response({"choices": [{**CHOICE, "logprobs": {"content": []}, "weight_versions": SPANS}]}),
            InferenceError,
            "0 logprobs",
        ),
    ],
)
async def test_a_wrong_answer_is_one_error_with_the_url(
    answer: web.Response, error: type[Exception], text: str
) -> None:
    async with backend({"/inference/v1/generate": lambda body: answer}) as (server, _):
        with pytest.raises(error, match=text):
            await server.generate([1], PARAMS, request_id="r")
