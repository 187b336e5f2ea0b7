"""Backend for SGLang's native contract, which the embedded engine speaks as well.

Guarantees: tokens in, tokens out; versions come from the response (``weight_versions`` spans), never from the time it
arrived; only reads and requests that never reached the server are retried.
"""

from typing import Any

from agentrl.core.weights import WeightManifest, mismatches
from agentrl.inference.backend import Generation, InferenceError, PauseMode, SamplingParams
from agentrl.inference.http import ServerHttp

READY_SECONDS = 10.0
ALIVE_SECONDS = 10.0


class SGLangBackend:
    """One server at ``url``.

    Args:
        url: Base URL.
        timeout: Seconds one request may take, pauses included.
        embedded: Whether it is our engine, which can prove what it loaded.
    """

    def __init__(self, url: str, timeout: float, *, embedded: bool = False) -> None:
        self.url = url.rstrip("/")
        self.embedded = embedded
        self._http = ServerHttp(self.url, timeout)

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation through ``/generate``."""
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
        }
        if params.stop:
            sampling["stop"] = list(params.stop)
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        body = {"rid": request_id, "input_ids": token_ids, "sampling_params": sampling, "return_logprob": True}
        answer = await self._http.post("/generate", body)
        return self._generation(answer)

    def _generation(self, answer: Any) -> Generation:
        try:
            meta = answer["meta_info"]
            pairs = meta["output_token_logprobs"]
            ids = [int(entry[1]) for entry in pairs]
            reason = meta["finish_reason"]["type"]
            spans = meta.get("weight_versions")
            if spans is None:
                spans = [{"version": meta.get("weight_version", "0"), "start": 0, "end": len(ids)}]
            versions = [0] * len(ids)
            for span in spans:
                versions[span["start"] : span["end"]] = [version_number(span["version"])] * (
                    span["end"] - span["start"]
                )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise InferenceError(
                f"{self.url}/generate: the answer is not SGLang's ({type(error).__name__}: {error}): "
                f"{str(answer)[:300]}"
            ) from error
        return Generation(
            token_ids=ids,
            logprobs=[float(entry[0]) for entry in pairs],
            versions=versions,
            finish_reason=reason,
            cached_tokens=meta.get("cached_tokens", 0),
        )

    async def abort(self, request_id: str) -> None:
        """Give a request up."""
        await self._http.post("/abort_request", {"rid": request_id}, expect_json=False)

    async def ready(self) -> bool:
        """Whether ``/ready`` answers 200."""
        return await self._http.answers("/ready", READY_SECONDS)

    async def alive(self) -> bool:
        """Whether ``/model_info`` answers; it does so while paused."""
        return await self._http.answers("/model_info", ALIVE_SECONDS)

    async def version(self) -> int:
        """Version the server reports."""
        return version_number((await self._http.get("/model_info")).get("weight_version", "0"))

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        await self._http.post("/pause_generation", {"mode": mode}, expect_json=False)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._http.post("/continue_generation", {}, expect_json=False)

    async def load(self, path: str, version: int) -> None:
        """Load a folder of safetensors."""
        answer = await self._http.post(
            "/update_weights_from_disk", {"model_path": path, "weight_version": str(version)}
        )
        if not answer.get("success", False):
            raise InferenceError(f"{self.url}/update_weights_from_disk refused {path}: {answer.get('message')}")

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Compare fingerprints with what the embedded engine holds; of SGLang, which has none, compare the version."""
        if not self.embedded:
            return [] if await self.version() == manifest.version else ["weight_version"]
        answer = await self._http.post("/weights_checker", {"action": "fingerprint"})
        return mismatches(manifest.fingerprints, answer["fingerprints"])

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()


def version_number(label: str) -> int:
    """Policy version behind a server's label; servers that were not started by us say ``default``."""
    return int(label) if str(label).isdigit() else 0
