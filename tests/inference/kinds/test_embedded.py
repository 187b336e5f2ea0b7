"""What the embedded engine does beyond SGLang's contract."""

import json
from typing import Any

from aiohttp import web

from agentrl.core.weight_manifest import WeightManifest
from agentrl.inference.kinds.embedded import HOLDER, EmbeddedBackend
from tests.inference.scripted import scripted

FOLDER: dict[str, Any] = {"version": 2, "path": "/x", "transport": "disk", "dtype": "F32", "nbytes": 8}


async def test_verify_names_the_tensors_that_differ() -> None:
    seen: list[str] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append(path)
        return web.json_response({"fingerprints": {"a": "1", "b": "0"}})

    async with scripted(handler, EmbeddedBackend) as server:
        manifest = WeightManifest(**FOLDER, fingerprints={"a": "1", "b": "2", "c": "3"})
        assert await server.verify(manifest) == ["b", "c"]
    assert seen == ["/weights_checker"]


async def test_without_fingerprints_the_version_is_compared_as_with_sglang() -> None:
    async with scripted(lambda path, body: web.json_response({"weight_version": "1"}), EmbeddedBackend) as server:
        assert await server.verify(WeightManifest(**FOLDER, fingerprints={})) == ["weight_version"]


async def test_a_load_in_place_needs_no_flush() -> None:
    seen: list[tuple[str, Any]] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append((path, json.loads(body)))
        return web.json_response({"success": True})

    async with scripted(handler, EmbeddedBackend) as server:
        await server.pause("in_place")
        await server.load("/x", 2)
    assert [path for path, _ in seen] == ["/pause_generation", "/update_weights_from_disk"]


async def test_a_pause_names_its_holder_and_its_lease_and_only_the_holder_renews_and_resumes() -> None:
    seen: list[tuple[str, Any]] = []

    def handler(path: str, body: bytes) -> web.Response:
        seen.append((path, json.loads(body)))
        return web.json_response({})

    async with scripted(handler, EmbeddedBackend) as server:
        await server.pause("retract")
        await server.renew()
        await server.resume()
    lease = {"lease_seconds": server.pause_lease, "holder": HOLDER}
    assert seen == [
        ("/pause_generation", {"mode": "retract", **lease}),
        ("/renew_pause", lease),
        ("/continue_generation", {"holder": HOLDER}),
    ]
