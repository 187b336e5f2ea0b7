"""The embedded engine (``agentrl/engine``): a server of our own that speaks SGLang's contract.

Guarantees: nothing of the engine is imported here; it is a process, started and asked like any other server. What it
loaded is proved by fingerprints of all tensors.
"""

from agentrl.core.weight_manifest import WeightManifest, mismatches
from agentrl.host.cpu_env import CPU_ENV
from agentrl.inference.kinds.kind import Capabilities, ServerKind, ServerStart
from agentrl.inference.kinds.sglang import SGLangBackend

KEPT_TOKENS = 16384  # size of the prefix cache: 750 MB for a 135M model in float32


class EmbeddedBackend(SGLangBackend):
    """Connection to an embedded engine at ``url``."""

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Compare fingerprints of all tensors, where the manifest has them."""
        if not manifest.fingerprints:
            return await super().verify(manifest)
        answer = await self._http.post("/weights_checker", {"action": "fingerprint"}, repeatable=True)
        return mismatches(manifest.fingerprints, answer["fingerprints"])

    async def _flush(self) -> None:
        """Nothing to do: the engine forgets the prefixes of old weights by itself."""


class Embedded(ServerKind):
    """Our engine: any Hugging Face causal language model, on CPU or GPU."""

    capabilities = Capabilities(
        starts=True,
        token_logprobs=True,
        token_versions=True,
        pause_modes=("retract", "in_place", "abort"),
        transports=("shm", "disk", "broadcast"),
        adapters=True,
        scoring=True,
    )

    def command(self, start: ServerStart) -> list[str]:
        """The engine, on a port it picks itself."""
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
        ]
        return [*command, "--threads", str(start.threads)] if start.threads else command

    def env(self, start: ServerStart) -> dict[str, str]:
        """Threads and memory as in all our processes that share the cores."""
        return CPU_ENV

    def backend(self, url: str, timeout: float) -> EmbeddedBackend:
        """SGLang's contract, and fingerprints."""
        return EmbeddedBackend(url, timeout)

    def more_memory(self, weights: int, token: int, device: str) -> list[tuple[str, int]]:
        """Kept prefixes, and on a CPU the weights in the layout of its operators."""
        found = [(f"kept for later prompts at most, {KEPT_TOKENS} tokens", KEPT_TOKENS * token)]
        return [*found, ("weights once more, packed", weights)] if device == "cpu" else found
