"""The kind ``vllm``: client of vLLM's HTTP API, and its command line.

Guarantees: as :mod:`agentrl.inference.kinds.sglang`. Policy versions come with the answers of
``/inference/v1/generate``, which needs a server started with ``--enable-scale-out``. Other servers are used through
``/v1/completions``, whose answers have no version. There no request is sent during a weight push, and a push aborts the
running ones, so the version at a request's start holds for all its tokens; ``weights.pause_mode`` must be ``abort``.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.core.image_reader import PromptImage
from agentrl.core.weight_manifest import WeightManifest
from agentrl.inference.backend import NEUTRAL, Backend, Generation, InferenceError, PauseMode, SamplingParams
from agentrl.inference.http import ALIVE_SECONDS, OPEN, Access, ServerHttp
from agentrl.inference.kinds.kind import Capabilities, ImageReading, ServerKind, ServerStart, StartOptions
from agentrl.inference.routed_experts import read_array, rows_wanted
from agentrl.inference.versions import version_number, versions_of

TOO_LONG = ("context", "maximum model length")  # words in the error message for a prompt that is too long
_PAUSES: dict[PauseMode, str] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_SIZES = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "ep": "--enable-expert-parallel",  # over all ranks of the server
}
EXPERTS_FLAG = "--enable-return-routed-experts"  # with which a server names the experts of tokens
_ABSENT = (403, 404)  # status of a call that the server's flags turn off


class VLLMBackend(Backend):
    """Connection to a vLLM server at ``url``.

    Args:
        url: Base URL.
        timeout: Most seconds of one request, pauses included.
        access: The server's key and trust.
    """

    def __init__(self, url: str, timeout: float, access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        self._http = ServerHttp(self.url, timeout, TOO_LONG, access)
        self._mode: PauseMode = "abort"
        self._model: str | None = None  # the served model's name, if the server has only /v1/completions
        self._scored_model: str | None = None  # the same name, for `score`
        self._forgot = False  # whether the weights that the server was started with were set to zero
        self._newest = 0  # policy version that this process knows the server to have, or to have had
        self._version: int | None = None  # the server's policy version, if it has only /v1/completions
        self._running = asyncio.Event()  # cleared during a weight push
        self._running.set()

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        sampling: dict[str, Any] = {
            **NEUTRAL,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(params.top_k, 0),
            "logprobs": 0,  # the sampled token's logprob only
        }
        if params.stop:
            sampling["stop"] = list(params.stop)
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if params.seed is not None:
            sampling["seed"] = params.seed
        if params.json_schema is not None:
            sampling["structured_outputs"] = {"json": params.json_schema}
        start = params.experts_from
        if start is not None:
            sampling["routed_experts_prompt_start"] = start
        if self._model is None:
            body = {"request_id": request_id, "token_ids": token_ids, "sampling_params": sampling, **self._salt()}
            if params.images:
                body["features"] = await self._features(params.images)
            try:
                answer = await self._http.post("/inference/v1/generate", body)
                found = self._generation(answer)
                if start is None or not found.token_ids:
                    return found
                rows = rows_wanted(len(token_ids), len(found.token_ids), start)
                server = f"{self.url} (started with {EXPERTS_FLAG}?)"
                return replace(found, experts=read_array(answer["choices"][0].get("routed_experts"), rows, server))
            except InferenceError as error:
                if error.status not in _ABSENT:
                    raise
            self._model = await self._served_model()
            self._version = await self.version()
        if params.images or start is not None:
            needed = "takes images beside token ids" if params.images else "names the experts of tokens here"
            raise InferenceError(
                f"{self.url} has no /inference/v1/generate, the only call that {needed}: start it with "
                "--enable-scale-out"
            )
        return await self._complete(token_ids, sampling, request_id)

    async def _features(self, images: Sequence[PromptImage]) -> dict[str, Any]:
        """Has the server process the images of a prompt, and says where their placeholders are in our ids.

        vLLM takes images beside ids as the features that its renderer makes of a chat message
        (``/v1/chat/completions/render``); its own ids of that message are not used.
        """
        if self._scored_model is None:
            self._scored_model = await self._served_model()
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        body = {"model": self._scored_model, "messages": [{"role": "user", "content": parts}]}
        answer = await self._http.post("/v1/chat/completions/render", body, repeatable=True)
        try:
            features = answer["features"]
            found = features["mm_placeholders"]["image"]
            lengths = [image.end - image.start for image in images]
            if [one["length"] for one in found] != lengths:
                raise ValueError(f"images of {[one['length'] for one in found]} placeholders, want {lengths}")
            features["mm_placeholders"]["image"] = [
                {**one, "offset": image.start} for one, image in zip(found, images, strict=True)
            ]
            return features
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense("/v1/chat/completions/render", answer, error) from error

    def _generation(self, answer: Any) -> Generation:
        try:
            (choice,) = answer["choices"]
            ids = [int(token) for token in choice["token_ids"]]
            content = choice["logprobs"]["content"] if ids else []
            logprobs = [float(entry["logprob"]) for entry in content]
            versions = versions_of(choice.get("weight_versions") or (), len(ids))
            self._newest = max(self._newest, *versions[-1:])
            return _checked(ids, logprobs, versions, choice["finish_reason"])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._nonsense("/inference/v1/generate", answer, error) from error

    def _salt(self) -> dict[str, str]:
        """Field of a request that keeps its prefixes apart from those of other versions.

        A push in place may leave these in the cache; vLLM 0.32.0 leaves none, because its pause drops all in any mode.
        """
        return {"cache_salt": str(self._newest)}

    async def _complete(self, token_ids: list[int], sampling: dict[str, Any], request_id: str) -> Generation:
        await self._running.wait()
        version = self._version or 0
        body = {**sampling, "model": self._model, "prompt": token_ids, "return_token_ids": True, **self._salt()}
        answer = await self._http.post("/v1/completions", {**body, "request_id": request_id})
        try:
            (choice,) = answer["choices"]
            ids = [int(token) for token in choice["token_ids"]]
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]] if ids else []
            return _checked(ids, logprobs, [version] * len(ids), choice["finish_reason"])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._nonsense("/v1/completions", answer, error) from error

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs at temperature 1 of the tokens from position ``start`` (at least 1) on, through ``/v1/completions``.

        vLLM computes a prompt's logprobs from the unmodified logits, whatever ``--logprobs-mode`` is.
        """
        if self._scored_model is None:
            self._scored_model = await self._served_model()
        body = {"model": self._scored_model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._http.post("/v1/completions", {**body, "temperature": 1.0}, repeatable=True)
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"]
            if len(entries) != len(token_ids):
                raise ValueError(f"{len(entries)} logprobs of {len(token_ids)} tokens")
            pairs = zip(entries[start:], token_ids[start:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._nonsense("/v1/completions", answer, error) from error

    def _nonsense(self, path: str, answer: Any, error: Exception) -> InferenceError:
        return InferenceError(
            f"{self.url}{path}: the answer is not vLLM's ({type(error).__name__}: {error}): {str(answer)[:300]}"
        )

    async def _served_model(self) -> str:
        models = await self._http.get("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise self._nonsense("/v1/models", models, error) from error

    async def alive(self) -> bool:
        """Whether ``/health`` answers; it does so while paused."""
        return await self._http.answers("/health", ALIVE_SECONDS)

    async def version(self) -> int:
        """Version the server reports; 0 if it has no calls for weights."""
        try:
            return version_number((await self._http.get("/weight_info")).get("weight_version", "0"))
        except InferenceError as error:
            if error.status in _ABSENT:
                return 0
            raise

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        if self._model is not None and mode != "abort":
            raise InferenceError(
                f"{self.url} has no /inference/v1/generate, the only call that returns the policy version of each "
                "token: start it with --enable-scale-out, or set weights.pause_mode=abort"
            )
        self._mode = mode
        self._running.clear()
        await self._control(f"/pause?mode={_PAUSES[mode]}")

    async def resume(self) -> None:
        """Continue sampling after a pause."""
        await self._control("/resume")
        self._running.set()

    async def paused(self) -> bool | None:
        """What ``/is_paused`` answers; ``None`` if the server's flags turn it off."""
        try:
            return bool((await self._http.get("/is_paused")).get("is_paused"))
        except InferenceError as error:
            if error.status in _ABSENT:
                return None
            raise

    async def load(self, path: str, version: int) -> None:
        """Load the safetensors files of a folder."""
        if not any(Path(path).glob("*.safetensors")):  # a failed load ends vLLM's process
            raise InferenceError(f"{self.url}: {path} holds no safetensors file that could be loaded")
        if not self._forgot:  # what a load leaves as it was (GPT-OSS's experts in 0.32) must show in the first push
            await self._control("/weight_checker", {"action": "reset"}, needed=False)
            self._forgot = True
        await self._control("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        # in place, paused requests keep the KV cache of the old weights, and while there are any nothing is dropped
        anew = "" if self._mode == "in_place" else "?reset_running_requests=true"
        await self._control(f"/reset_prefix_cache{anew}")
        await self._control("/reset_encoder_cache", needed=False)  # of images' features, by the old tower
        await self._control("/update_weight_version", {"new_version": str(version)})
        self._version = self._newest = version

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Compare the version only: vLLM refuses unknown parameters, and cannot report a parameter's values."""
        return [] if await self.version() == manifest.version else ["weight_version"]

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()

    async def _control(self, path: str, body: dict[str, Any] | None = None, *, needed: bool = True) -> None:
        """Makes a call that changes the server; one that is not ``needed`` may be unknown to older servers."""
        try:
            await self._http.post(path, body, expect_json=False, repeatable=True)
        except InferenceError as error:
            if error.status in _ABSENT:
                if not needed:
                    return
                raise InferenceError(
                    f"{self.url} has no {path.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1 in its "
                    "environment"
                ) from error
            raise


def _checked(ids: list[int], logprobs: list[float], versions: list[int], finish: Any) -> Generation:
    """Returns the values as a generation if they are consistent.

    Raises:
        ValueError: The values are not consistent.
    """
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(ids)} ids and {len(logprobs)} logprobs")
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {finish!r}")
    return Generation(ids, logprobs, versions, finish)


class VLLM(ServerKind):
    """The kind ``vllm``: vLLM's server; tested with 0.32.0."""

    capabilities = Capabilities(
        starts=True,
        token_logprobs=True,
        token_versions=True,
        pause_modes=("retract", "in_place", "abort"),
        transports=("shm", "disk"),
        structured_output=True,
        images=True,
        mixed_placeholders=False,  # its process dies at others: vLLM 0.32 is told only where an image begins and ends
        images_go_on=False,  # vLLM 0.32's process dies when an image is needed again that lay in a cached prefix
        experts=True,
        scoring=True,
        remote=True,
        parallel=("tp", "pp", "dp", "ep"),
        reasons={"broadcast": "vLLM broadcasts weights over NCCL only, in a process group of its own kind"},
    )
    package = "vllm"
    install = "install it into an environment of its own (make vllm does so for a CPU)"
    ready_path = "/health"

    def command(self, start: ServerStart) -> list[str]:
        """Command line of vLLM's server, with the calls and the logprobs that training needs."""
        command = [
            *start.module("vllm.entrypoints.openai.api_server"),
            *("--model", str(start.model)),
            *("--host", start.host, "--port", str(start.port)),
            *("--dtype", start.dtype),
            *("--max-model-len", str(start.context_length)),
            *("--max-num-seqs", str(start.max_running)),
            *("--seed", str(start.seed)),
            *("--logprobs-mode", "processed_logprobs"),  # logprobs of the distribution that was sampled from
            "--enable-scale-out",  # turns on the call that returns the policy version of each token
            *(["--trust-remote-code"] if start.trust else []),
            *([EXPERTS_FLAG] if start.experts else []),
            *(self.for_images(start.images).flags if start.images else []),
        ]
        for name, size in start.sizes.items():
            command += [_SIZES[name], str(size)] if name != "ep" else [_SIZES[name]]
        if start.certificate:
            command += ["--ssl-certfile", start.certificate, "--ssl-keyfile", start.private_key]
        return [*command, "--enforce-eager"] if start.device == "cpu" else command

    def env(self, start: ServerStart) -> dict[str, str]:
        """Settings that turn on the calls for weights, turn off the network, and set a CPU's cache size and threads."""
        env = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # vLLM has calls for weights in this mode only
        if start.experts:
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that names experts
        if start.device == "cpu":
            env["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GB
            if start.threads:
                env["OMP_NUM_THREADS"] = str(start.threads)
        return env

    def for_images(self, reading: ImageReading) -> StartOptions:
        """Turns off a cache with which the renderer leaves out the features of an image that it has seen before."""
        pillow = ["--mm-processor-kwargs", '{"use_fast": false}'] if reading.pillow else []
        return StartOptions({}, ["--mm-processor-cache-gb", "0", *pillow])

    def backend(self, url: str, timeout: float, access: Access = OPEN) -> VLLMBackend:
        """Connect to the server at ``url``, with or without ``--enable-scale-out``."""
        return VLLMBackend(url, timeout, access)
