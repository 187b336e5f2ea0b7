"""The SGLang backend against a scripted server on a real socket: requests, spans, errors."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.core.agent import ContextOverflow
from agentrl.core.weight_manifest import BroadcastPlan, TensorSpec, WeightManifest
from agentrl.inference.backend import InferenceError, PauseMode, SamplingParams, ServerUnreachable
from agentrl.inference.kinds.sglang import SGLangBackend
from tests.inference.scripted import Handler, scripted

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, stop=("x",), seed=3)


def backend(handler: Handler) -> AbstractAsyncContextManager[SGLangBackend]:
    return scripted(handler, SGLangBackend)


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
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


async def test_scores_are_asked_from_the_position_before_and_the_first_one_is_dropped() -> None:
    seen: list[Any] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(json.loads(body))
        pairs = [[None, 6, None], [-0.5, 7, None], [-0.25, 8, None]]  # SGLang pads the first position with null
        return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": pairs}})

    async with backend(handler) as server:
        assert await server.score([5, 6, 7, 8], 2) == [-0.5, -0.25]
        with pytest.raises(InferenceError, match=r"not SGLang's .*3 logprobs of 4 tokens"):
            await server.score([5, 6, 7, 8], 1)
    assert (seen[0]["input_ids"], seen[0]["logprob_start_len"], seen[0]["return_logprob"]) == ([5, 6, 7, 8], 1, True)
    assert seen[0]["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


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


async def test_an_unreachable_server_is_an_error_with_the_url_and_not_alive() -> None:
    server = SGLangBackend("http://127.0.0.1:9", 5.0)  # the discard port: nobody listens
    assert not await server.alive()
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

    def handler(path: str, body: bytes) -> None:
        seen.append(path)

    async with backend(handler) as server:
        with pytest.raises(ServerUnreachable):
            await server.generate([1], PARAMS, request_id="r")
        assert seen == ["/generate"]
        with pytest.raises(ServerUnreachable):
            await server.version()
        assert seen[0] == "/generate" and set(seen[1:]) == {"/model_info"} and len(seen) > 2


async def test_a_cancelled_request_is_aborted_by_its_id_before_its_connection_is_closed() -> None:
    events: list[str] = []
    asked, aborted = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if request.path == "/generate":
            events.append(f"generate {body['rid']}")
            asked.set()
            await aborted.wait()
            assert request.transport is not None
            events.append("closed" if request.transport.is_closing() else "open")
            return web.json_response({"meta_info": meta()})
        events.append(f"abort {body['rid']}")
        aborted.set()
        await asyncio.sleep(0)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        client = SGLangBackend(str(server.make_url("")), 5.0)
        request = asyncio.create_task(client.generate([1], PARAMS, request_id="r7"))
        await asked.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await client.close()
    assert events[:3] == ["generate r7", "abort r7", "open"]


async def test_a_request_that_is_cancelled_when_its_server_is_gone_ends_all_the_same() -> None:
    client = SGLangBackend("http://127.0.0.1:9", 5.0)
    client._http.post = never_answers  # type: ignore[method-assign, assignment]
    request = asyncio.create_task(client.generate([1], PARAMS, request_id="r"))
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    (aborting,) = client._aborting
    aborting.cancel()
    await asyncio.gather(aborting, return_exceptions=True)
    assert not client._aborting


async def never_answers(path: str, body: object, **more: object) -> None:
    await asyncio.Event().wait()


async def test_a_control_call_that_may_be_carried_out_twice_is_repeated_when_the_connection_breaks() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response | None:
        seen.append(path)
        return None if len(seen) == 1 else web.json_response({"success": True})

    async with backend(handler) as server:
        await server.resume()
    assert seen == ["/continue_generation"] * 2


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("flushed", [200, 400])
async def test_a_load_is_followed_by_a_flush_that_waits_and_may_fail_in_place_alone(
    monkeypatch: pytest.MonkeyPatch, mode: PauseMode, flushed: int
) -> None:
    seen: list[tuple[str, Any]] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append((path, json.loads(body or b"{}")))
        return web.json_response({"success": True}, status=flushed if path == "/flush_cache" else 200)

    asked: list[str] = []
    async with backend(handler) as server:
        answers = server._http.answers

        async def noted(path: str, timeout: float) -> bool:
            asked.append(path)
            return await answers(path, timeout)

        monkeypatch.setattr(server._http, "answers", noted)
        await server.pause(mode)
        if flushed == 400 and mode != "in_place":
            with pytest.raises(InferenceError, match="prefixes of old weights"):
                await server.load("/x", 2)
        else:
            await server.load("/x", 2)
    assert dict(seen)["/update_weights_from_disk"]["flush_cache"] is False
    assert [path for path, _ in seen] == ["/pause_generation", "/update_weights_from_disk", "/flush_cache"]
    waits = "?timeout=10" if mode == "abort" else ""
    assert asked == [f"/flush_cache{waits}"], "SGLang would wait for retracted requests, too"


async def test_prefixes_of_one_version_are_not_used_by_requests_of_another() -> None:
    """SGLang keeps them over a push in place while requests run; who pushes nothing learns of it from answers."""
    salts: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        if path == "/generate":
            salts.append(json.loads(body)["cache_salt"])
        spans = [{"version": "6", "start": 0, "end": 3}]
        return web.json_response(
            {"success": True, "output_ids": [11, 12, 13], "meta_info": meta(weight_versions=spans)}
        )

    async with backend(handler) as server:
        for version in (None, 7, 3):
            if version is not None:
                await server.load("/x", version)
            await server.generate([1, 2], PARAMS, request_id="r")
        await server.generate([1, 2], PARAMS, request_id="r")
    assert salts == ["0", "7", "3", "6"]


PLAN = BroadcastPlan(
    group="g", address="host", port=5, backend="gloo", world_size=3, offsets={"http://other": 1}, join=True,
    buckets=((TensorSpec(name="a", shape=(2, 3)),), (TensorSpec(name="b", shape=(4,)),)),
)  # fmt: skip


@pytest.mark.parametrize("begin", [200, 404])
async def test_a_broadcast_is_taken_bucket_by_bucket_and_the_last_one_carries_the_version(begin: int) -> None:
    seen: list[tuple[str, Any]] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append((path, json.loads(body or b"{}")))
        return web.json_response({"success": True}, status=begin if path == "/begin_weight_update" else 200)

    async with backend(handler) as server:
        plan = PLAN.model_copy(update={"offsets": {server.url: 2}})
        manifest = WeightManifest(
            version=7, transport="broadcast", dtype="BF16", nbytes=1, fingerprints={}, broadcast=plan
        )
        await server.receive(manifest, plan)
    paths = [path.removeprefix("/") for path, _ in seen]
    around = ["end_weight_update"] if begin == 200 else []  # before 0.5.21 there is no session
    assert paths == [
        "init_weights_update_group",
        "begin_weight_update",
        *["update_weights_from_distributed"] * 2,
        *around,
        "flush_cache",
    ]
    assert seen[0][1]["rank_offset"] == 2 and seen[0][1]["master_port"] == 5
    first, last = seen[2][1], seen[3][1]
    assert (first["names"], first["dtypes"], first["shapes"]) == (["a"], ["bfloat16"], [[2, 3]])
    assert "weight_version" not in first and first["flush_cache"] is False
    assert last["weight_version"] == "7" and last["flush_cache"] is False


async def test_a_group_that_was_never_joined_is_no_hindrance() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(path)
        return web.json_response({"success": True}, status=400 if path == "/destroy_weights_update_group" else 200)

    async with backend(handler) as server:
        plan = PLAN.model_copy(update={"offsets": {server.url: 1}, "leave": "old"})
        manifest = WeightManifest(
            version=7, transport="broadcast", dtype="F32", nbytes=1, fingerprints={}, broadcast=plan
        )
        await server.receive(manifest, plan)
    assert seen[:2] == ["/destroy_weights_update_group", "/init_weights_update_group"]


async def test_a_server_of_another_kind_is_told_apart_before_training() -> None:
    async with backend(lambda path, body: web.Response(status=404)) as server:
        with pytest.raises(InferenceError, match=r"neither SGLang nor the embedded engine.*trainer\.type=null"):
            await server.version()


async def test_a_broadcast_that_fails_leaves_no_session_open() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(path)
        failed = path == "/update_weights_from_distributed"
        return web.json_response({"success": not failed, "message": "the sender left"})

    async with backend(handler) as server:
        plan = PLAN.model_copy(update={"offsets": {server.url: 1}, "join": False})
        manifest = WeightManifest(
            version=7, transport="broadcast", dtype="F32", nbytes=1, fingerprints={}, broadcast=plan
        )
        with pytest.raises(InferenceError, match="the sender left"):
            await server.receive(manifest, plan)
    assert seen[-1] == "/end_weight_update"


async def test_a_class_whose_values_the_server_does_not_show_is_verified_by_its_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SGLang 0.5.23 shows none of Qwen's; a name that it lacks among others that it shows is a difference."""
    shown: dict[str, list[float]] = {}

    def handler(path: str, body: bytes) -> web.Response:
        if path == "/model_info":
            return web.json_response({"weight_version": "7"})
        held = shown.get(json.loads(body)["name"])
        if held is None:
            return web.json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        return web.json_response(held)

    samples = {"a": [1.0, 2.0], "b": [5.5]}
    more = {"transport": "shm", "path": "/x", "dtype": "F32", "nbytes": 8, "fingerprints": {}}
    manifest = WeightManifest.model_validate({"version": 7, "samples": samples, **more})
    async with backend(handler) as server:
        assert await server.verify(manifest) == await server.verify(manifest) == []
        assert caplog.text.count("verified by their version alone") == 1
        assert await server.verify(manifest.model_copy(update={"version": 8})) == ["weight_version"]
        shown["a"] = [1.0, 2.0]
        assert await server.verify(manifest) == ["b"]


async def test_values_that_differ_from_the_samples_are_named() -> None:
    held = {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [5.0]}

    def handler(path: str, body: bytes) -> web.Response:
        if path == "/model_info":
            return web.json_response({"weight_version": "2"})
        return web.json_response(held[json.loads(body)["name"]])

    async with backend(handler) as server:
        manifest = WeightManifest(
            version=2, transport="disk", path="/x", dtype="F32", nbytes=8, fingerprints={},
            samples={"a": [1.0, 2.0], "b": [5.5]},
        )  # fmt: skip
        assert await server.verify(manifest) == ["b"]


async def test_values_that_sglang_reads_from_a_wrong_row_are_not_compared() -> None:
    """0.5.23 takes hidden size / heads for a head's size, so it shows other rows of fused keys of Mistral Nemo."""
    held = {"l.q_proj.weight": [1.0], "l.k_proj.weight": [9.0], "l.v_proj.weight": [9.0], "l.mlp.up_proj.weight": [9.0]}

    def handler(path: str, body: bytes) -> web.Response:
        if path == "/model_info":
            return web.json_response({"weight_version": "2"})
        return web.json_response(held[json.loads(body)["name"]])

    manifest = WeightManifest(
        version=2, transport="disk", path="/x", dtype="F32", nbytes=8, fingerprints={},
        samples={name: [1.0] for name in held},
    )  # fmt: skip
    async with backend(handler) as server:
        assert await server.verify(manifest) == []
        held["l.q_proj.weight"] = [2.0]
        assert await server.verify(manifest) == ["l.q_proj.weight"]


async def test_another_version_is_named() -> None:
    manifest = WeightManifest(version=2, path="/x", transport="disk", dtype="F32", nbytes=8, fingerprints={"a": "1"})
    async with backend(lambda path, body: web.json_response({"weight_version": "1"})) as other:
        assert await other.verify(manifest) == ["weight_version"]


@pytest.mark.parametrize(("status", "paused"), [(200, False), (503, True), (404, None)])
async def test_ready_tells_whether_a_server_is_paused(status: int, paused: bool | None) -> None:
    """SGLang answers 503 while paused; a server older than 0.5.20 has no such call."""
    async with backend(lambda path, body: web.Response(status=status) if path == "/ready" else None) as server:
        assert await server.paused() is paused


async def test_an_update_that_a_dead_client_left_open_is_closed_first() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(path)
        if path == "/begin_weight_update" and "/end_weight_update" not in seen:
            return web.json_response({"message": "a weight update is open"}, status=400)
        return web.json_response({"success": True})

    plan = BroadcastPlan(
        group="g", address="host", port=5, backend="gloo", world_size=2, offsets={}, join=False, buckets=()
    )  # fmt: skip
    async with backend(handler) as server:
        sent = WeightManifest(version=4, transport="broadcast", dtype="F32", nbytes=4, fingerprints={}, broadcast=plan)
        await server.receive(sent, plan)
    assert seen[:4] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update", "/end_weight_update"]


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_request_that_nobody_waits_for_is_aborted_on_the_server(how: str) -> None:
    """SGLang looks every four seconds whether a client is still there; a cancelled one frees its place at once."""
    asked, aborted = asyncio.Event(), asyncio.Event()
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        seen.append((request.path, body.get("rid")))
        if request.path == "/abort_request":
            aborted.set()
            return web.Response()
        asked.set()
        await aborted.wait()
        return web.json_response({"output_ids": [], "meta_info": meta()})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as listening:
        server = SGLangBackend(str(listening.make_url("")), 60.0 if how == "cancelled" else 0.2)
        request = asyncio.create_task(server.generate([1], PARAMS, request_id="mine"))
        await asked.wait()
        if how == "cancelled":
            request.cancel()
        with pytest.raises((asyncio.CancelledError, ServerUnreachable)):
            await request
        await server.close()  # waits for the abort
        assert aborted.is_set()
    assert seen == [("/generate", "mine"), ("/abort_request", "mine")]
