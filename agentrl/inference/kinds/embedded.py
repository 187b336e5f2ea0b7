"""The embedded engine (``agentrl/engine``): agentrl's own server, with SGLang's HTTP API.

Guarantees: nothing of the engine is imported here; it is a process, started and called like any other server. Loaded
weights are verified by fingerprints of all tensors. A pause has a lease (``agentrl/engine/pause_lease.py``): the engine
resumes by itself when this process does not renew it, and no other process ends it before.
"""

import os
import socket
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from agentrl.core.image_reader import PromptImage
from agentrl.core.weight_manifest import WeightManifest, mismatches
from agentrl.host.cpu_env import CPU_ENV
from agentrl.inference.backend import PauseMode
from agentrl.inference.http import OPEN, Access
from agentrl.inference.kinds.kind import Capabilities, ServerKind, ServerStart
from agentrl.inference.kinds.sglang import SGLangBackend

HOLDER = f"{socket.gethostname()}:{os.getpid()}-{uuid.uuid4().hex[:8]}"  # this process, as the holder of pauses
PAUSE_SECONDS = 20.0  # lease of a pause: how long a server stays paused after its client died
KEPT_TOKENS = 16384  # tokens in the prefix cache: 750 MB for a 135M model in float32


class EmbeddedBackend(SGLangBackend):
    """Connection to an embedded engine at ``url``."""

    pause_lease = PAUSE_SECONDS

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling, until this process resumes or no longer renews the pause.

        Raises:
            InferenceError: Another process holds a pause.
        """
        body = {"mode": mode, "lease_seconds": PAUSE_SECONDS, "holder": HOLDER}
        await self._http.post("/pause_generation", body, expect_json=False, repeatable=True)

    async def renew(self) -> None:
        """Extend the lease of this process's pause."""
        body = {"lease_seconds": PAUSE_SECONDS, "holder": HOLDER}
        await self._http.post("/renew_pause", body, expect_json=False, repeatable=True)

    async def resume(self) -> None:
        """Continue sampling, unless another process holds the pause."""
        await self._http.post("/continue_generation", {"holder": HOLDER}, expect_json=False, repeatable=True)

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Compare fingerprints of all tensors, if the manifest has them."""
        if not manifest.fingerprints:
            return await super().verify(manifest)
        answer = await self._http.post("/weights_checker", {"action": "fingerprint"}, repeatable=True)
        return mismatches(manifest.fingerprints, answer["fingerprints"])

    async def _or_abort(self, request_id: str, request: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a request: the engine aborts one whose connection is closed at once."""
        return await request

    def _prompt_fields(self, token_ids: list[int], images: Sequence[PromptImage]) -> dict[str, Any]:
        """Sends the ids as they are, and where the images' placeholders stand: an answer may hold some too."""
        if not images:
            return {"input_ids": token_ids}
        places = [[image.start, image.end] for image in images]
        return {"input_ids": token_ids, "image_data": [image.url for image in images], "image_places": places}

    async def _flush(self) -> None:
        """Does nothing: the engine empties its prefix cache when weights change."""


class Embedded(ServerKind):
    """The embedded engine: any Hugging Face causal language model, on CPU or GPU."""

    capabilities = Capabilities(
        starts=True,
        token_logprobs=True,
        token_versions=True,
        pause_modes=("retract", "in_place", "abort"),
        transports=("shm", "disk", "broadcast"),
        weight_names="model",
        adapters=True,
        images=True,
        videos=True,
        experts=True,
        scoring=True,
        remote=True,
        reasons={"parallel": "a server of it is one process"},
    )

    def command(self, start: ServerStart) -> list[str]:
        """Command line of the engine, which picks its port itself."""
        command = [
            *(start.python, "-m", "agentrl.engine"),
            *("--model", str(start.model)),
            *("--ready-file", str(start.ready_file)),
            *("--dtype", start.dtype),
            *("--device", start.device),
            *("--max-running", str(start.max_running)),
            *("--context-length", str(start.context_length)),
            *("--kept-tokens", str(KEPT_TOKENS)),
            *("--seed", str(start.seed)),
            *("--host", start.host),
            *("--port", str(start.port)),
        ]
        if start.certificate:
            command += ["--tls-certificate", start.certificate, "--tls-key", start.private_key]
        command += ["--trust-remote-code"] if start.trust else []
        command += [EmbeddedBackend.experts_flag] if start.experts else []
        return [*command, "--threads", str(start.threads)] if start.threads else command

    def env(self, start: ServerStart) -> dict[str, str]:
        """Settings of threads and memory for processes that share a CPU's cores."""
        return CPU_ENV

    def backend(self, url: str, timeout: float, access: Access = OPEN) -> EmbeddedBackend:
        """Connect to the engine at ``url``."""
        return EmbeddedBackend(url, timeout, access)

    def more_memory(self, weights: int, token: int, device: str) -> list[tuple[str, int]]:
        """Memory of the prefix cache, and on a CPU of the packed weights."""
        found = [(f"prefix cache at most, {KEPT_TOKENS} tokens", KEPT_TOKENS * token)]
        return [*found, ("weights once more, packed", weights)] if device == "cpu" else found
