"""The kind ``sglang``: client of SGLang's native HTTP API, which the embedded engine has too, and its command line.

Guarantees: requests and answers are token ids; policy versions come from the answer (``weight_versions`` spans), never
from the time of its arrival; only idempotent requests and those that never reached the server are repeated. A request
whose caller is cancelled, or that was not answered in time, is aborted on the server by its id, before its connection
is closed.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from agentrl.core.image_reader import PromptImage
from agentrl.core.weight_manifest import SAMPLED, BroadcastPlan, TensorSpec, WeightManifest
from agentrl.inference.backend import (
    NEUTRAL,
    Backend,
    Generation,
    InferenceError,
    PauseMode,
    SamplingParams,
    ServerUnreachable,
)
from agentrl.inference.http import ALIVE_SECONDS, OPEN, Access, ServerHttp
from agentrl.inference.kinds.kind import Capabilities, ImageReading, ServerKind, ServerStart, StartOptions
from agentrl.inference.routed_experts import read_numbers, rows_wanted
from agentrl.inference.sglang_images import check_expanded, one_placeholder_each, start_options
from agentrl.inference.versions import version_number, versions_of

log = logging.getLogger(__name__)

ABORT_SECONDS = 5.0  # when a connection is closed, for calls that abort its requests
FLUSH_SECONDS = 10  # for requests that were aborted or given up to leave the scheduler
TOO_LONG = ("context",)  # words in the error message for a prompt that is too long
_SHIFTED = re.compile(r"\.(k|v|up)_proj\.")  # shown from a wrong row where heads have their own size (Mistral Nemo)
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class SGLangBackend(Backend):
    """Connection to an SGLang server at ``url``.

    Args:
        url: Base URL.
        timeout: Most seconds of one request, pauses included.
        access: The server's key and trust.
    """

    experts_flag = "--enable-return-routed-experts"  # with which such a server names experts

    def __init__(self, url: str, timeout: float, access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        self._http = ServerHttp(self.url, timeout, TOO_LONG, access)
        self._mode: PauseMode = "abort"  # of the latest pause
        self._aborting: set[asyncio.Task[None]] = set()
        self._newest = 0  # policy version that this process knows the server to have, or to have had
        self._told = False  # that the server shows no values

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation through ``/generate``."""
        sampling: dict[str, Any] = {**NEUTRAL, "max_new_tokens": params.max_new_tokens}
        sampling |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        if params.stop:
            sampling["stop"] = list(params.stop)
        if params.stop_token_ids:
            sampling["stop_token_ids"] = list(params.stop_token_ids)
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        if params.json_schema is not None:
            sampling["json_schema"] = params.json_schema
        prompt = self._prompt_fields(token_ids, params.images)
        body = {"rid": request_id, "sampling_params": sampling, "return_logprob": True, **prompt}
        start = params.experts_from
        if start is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": start}
        answer = await self._or_abort(request_id, self._http.post("/generate", body))
        generation = self._generation(answer)
        if start is not None and generation.token_ids:
            rows = rows_wanted(len(token_ids), len(generation.token_ids), start)
            server = f"{self.url} (started with {self.experts_flag}?)"
            experts = read_numbers(answer["meta_info"].get("routed_experts"), rows, server)
            generation = replace(generation, experts=experts)
        if params.images:
            check_expanded(answer, len(token_ids), self.url)
        return generation

    def _prompt_fields(self, token_ids: list[int], images: Sequence[PromptImage]) -> dict[str, Any]:
        """Returns the fields of a request that hold its prompt.

        SGLang wants one placeholder for each image, and expands it itself; a prompt with more hangs for ever. It keeps
        prefixes over a push while requests are running (:meth:`_flush`): each version has its own.
        """
        sent = one_placeholder_each(token_ids, images, self.url) if images else token_ids
        shown = {"image_data": [image.url for image in images]} if images else {}
        return {"input_ids": sent, "cache_salt": str(self._newest), **shown}

    async def _or_abort(self, request_id: str, request: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a request; if the caller is cancelled or its time is over, have the server abort it.

        SGLang looks for closed connections every few seconds, and for some requests it never does: they would run on
        (sglang issues 1755, 37833).
        """
        sent = asyncio.ensure_future(request)
        try:
            return await asyncio.shield(sent)
        except asyncio.CancelledError:
            if not sent.done():
                self._give_up(request_id, sent)
            raise
        except ServerUnreachable as error:
            if error.timed_out:
                self._give_up(request_id, sent)
            raise

    def _give_up(self, request_id: str, sent: "asyncio.Future[Any]") -> None:
        aborting = asyncio.create_task(self._abort(request_id, sent))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, request_id: str, sent: "asyncio.Future[Any]") -> None:
        """Tell the server to abort a request, then give its connection up."""
        try:
            with contextlib.suppress(InferenceError, TimeoutError):  # a server that is gone runs nothing
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._http.post("/abort_request", {"rid": request_id}, expect_json=False, repeatable=True)
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    def _generation(self, answer: Any) -> Generation:
        try:
            meta = answer["meta_info"]
            pairs = meta["output_token_logprobs"]
            ids = [int(entry[1]) for entry in pairs]
            reason = meta["finish_reason"]["type"]
            spans = meta.get("weight_versions")
            if spans is None:
                spans = [{"version": meta.get("weight_version", "0"), "start": 0, "end": len(ids)}]
            versions = versions_of(spans, len(ids))
            self._newest = max(self._newest, *versions[-1:])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._nonsense(answer, error) from error
        return Generation(
            token_ids=ids,
            logprobs=[float(entry[0]) for entry in pairs],
            versions=versions,
            finish_reason=reason,
        )

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs at temperature 1 of the tokens from position ``start`` (at least 1) on, through ``/generate``.

        The request begins one position earlier, because SGLang returns no logprob for its first position.
        """
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        answer = await self._http.post("/generate", body, repeatable=True)
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            if len(entries) != len(token_ids) - start + 1:
                raise ValueError(f"{len(entries)} logprobs of {len(token_ids) - start + 1} tokens")
            return [float(entry[0]) for entry in entries[1:]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self._nonsense(answer, error) from error

    def _nonsense(self, answer: Any, error: Exception) -> InferenceError:
        return InferenceError(
            f"{self.url}/generate: the answer is not SGLang's ({type(error).__name__}: {error}): {str(answer)[:300]}"
        )

    async def alive(self) -> bool:
        """Whether ``/model_info`` answers; it does so while paused."""
        return await self._http.answers("/model_info", ALIVE_SECONDS)

    async def version(self) -> int:
        """Version the server reports.

        Raises:
            InferenceError: The server is of another kind, or does not answer.
        """
        try:
            return version_number((await self._http.get("/model_info")).get("weight_version", "0"))
        except InferenceError as error:
            if error.status != 404:
                raise
            raise InferenceError(
                f"{self.url} has no /model_info, so it is neither SGLang nor the embedded engine; training needs a "
                "server that returns token ids and loads weights; set inference.engine to the server's kind, or "
                "trainer.type=null to evaluate"
            ) from error

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling."""
        self._mode = mode
        await self._http.post("/pause_generation", {"mode": mode}, expect_json=False, repeatable=True)

    async def resume(self) -> None:
        """Continue sampling after a pause."""
        await self._http.post("/continue_generation", {}, expect_json=False, repeatable=True)

    async def paused(self) -> bool | None:
        """Whether ``/ready`` answers 503, as it does while paused; servers older than 0.5.20 have no such call."""
        try:
            await self._http.get("/ready", expect_json=False)
        except InferenceError as error:
            if error.status not in (404, 503):
                raise
            return True if error.status == 503 else None
        return False

    async def load(self, path: str, version: int) -> None:
        """Load the safetensors files of a folder."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        await self._update("/update_weights_from_disk", body, repeatable=True)
        self._newest = version
        await self._flush()

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        """Receive a broadcast, bucket by bucket; the last one sets the version."""
        if plan.leave:
            with contextlib.suppress(InferenceError):  # the server may never have joined that group
                await self._http.post("/destroy_weights_update_group", {"group_name": plan.leave}, expect_json=False)
        if plan.join:
            join = {
                "master_address": plan.address, "master_port": plan.port, "rank_offset": plan.offsets[self.url],
                "world_size": plan.world_size, "group_name": plan.group, "backend": plan.backend,
            }  # fmt: skip
            await self._update("/init_weights_update_group", join)
        begun = await self._begin_update()
        try:
            for index, bucket in enumerate(plan.buckets):
                await self._receive_bucket(bucket, manifest, plan.group, last=index == len(plan.buckets) - 1)
        finally:
            if begun:  # also after a failure: an open update blocks the next one
                await self._update("/end_weight_update", {})
        self._newest = manifest.version
        await self._flush()

    async def _receive_bucket(
        self, bucket: tuple[TensorSpec, ...], manifest: WeightManifest, group: str, *, last: bool
    ) -> None:
        body: dict[str, Any] = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [_TORCH_NAMES[manifest.dtype]] * len(bucket),
            "shapes": [list(tensor.shape) for tensor in bucket],
            "group_name": group,
            "flush_cache": False,  # after the last one, see :meth:`_flush`
            **({"weight_version": str(manifest.version)} if last else {}),
        }
        await self._update("/update_weights_from_distributed", body)

    async def ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return int((await self._http.get("/server_info")).get("tp_size", 1))

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Compare the version and some values with the manifest.

        SGLang silently ignores unknown parameters, so a correct version alone does not prove that all were loaded. It
        shows values of some classes alone (0.5.23: Llama's, Granite's, OPT's, EXAONE 4's); of others, Qwen's among
        them, the version is all there is to compare, which the log says once.
        """
        if await self.version() != manifest.version:
            return ["weight_version"]
        held = {name: await self._first_values(name) for name in manifest.samples if not _SHIFTED.search(name)}
        if all(values is None for values in held.values()):
            if manifest.samples and not self._told:
                self._told = True
                log.warning("%s shows no values of its weights: pushes are verified by their version alone", self.url)
            return []
        return [name for name, values in held.items() if values != manifest.samples[name]]

    async def _first_values(self, name: str) -> list[float] | None:
        """Returns the first values of a parameter; ``None`` if the server shows none by this name."""
        body = {"name": name, "truncate_size": SAMPLED}
        try:
            held = await self._http.post("/get_weights_by_name", body, repeatable=True)
        except InferenceError as error:
            if error.status != 400:
                raise
            return None
        while held and isinstance(held[0], list):  # take the first rank's first row
            held = held[0]
        return held[:SAMPLED] if held else []

    async def _flush(self) -> None:
        """Flush the prefixes of old weights; requests that an ``in_place`` pause keeps may prevent it.

        It is a call of its own: a load that is asked to flush does not wait, and fails after an ``abort`` while a
        request that its client gave up is still in the scheduler. After a ``retract`` it must not wait: SGLang would
        wait for the retracted requests, too.

        Raises:
            InferenceError: The server has requests although it was paused otherwise.
        """
        path = f"/flush_cache?timeout={FLUSH_SECONDS}" if self._mode == "abort" else "/flush_cache"
        if not await self._http.answers(path, 2 * FLUSH_SECONDS) and self._mode != "in_place":
            raise InferenceError(
                f"{self.url}/flush_cache: requests are still running after the pause, so the server keeps prefixes of "
                "old weights"
            )

    async def _begin_update(self) -> bool:
        """Open an update; returns False if the server is older than 0.5.21 and has no such call.

        An update that is open already was left by a client that died in it; it is closed.
        """
        try:
            await self._update("/begin_weight_update", {})
        except InferenceError as error:
            if error.status == 404:
                return False
            if error.status != 400:
                raise
            await self._update("/end_weight_update", {})
            await self._update("/begin_weight_update", {})
        return True

    async def _update(self, path: str, body: dict[str, Any], *, repeatable: bool = False) -> None:
        answer = await self._http.post(path, body, repeatable=repeatable)
        if not answer.get("success", False):
            raise InferenceError(f"{self.url}{path} refused: {answer.get('message')}")

    async def close(self) -> None:
        """Close connections, after requests that are being aborted had a moment to be."""
        if self._aborting:
            await asyncio.wait(self._aborting, timeout=ABORT_SECONDS)
        for aborting in self._aborting:
            aborting.cancel()
        await asyncio.gather(*self._aborting, return_exceptions=True)
        await self._http.close()


class SGLang(ServerKind):
    """The kind ``sglang``: SGLang's server; tested with 0.5.23."""

    capabilities = Capabilities(
        starts=True,
        token_logprobs=True,
        token_versions=True,
        pause_modes=("retract", "in_place", "abort"),
        transports=("shm", "disk", "broadcast"),
        structured_output=True,
        images=True,
        experts=True,
        scoring=True,
        remote=True,
        parallel=("tp", "pp", "dp", "ep"),
    )
    package = "sglang"
    install = "install it into an environment of its own (make sglang does so for a CPU)"
    ready_path = "/ready"  # /health generates a token, and fails while paused

    def command(self, start: ServerStart) -> list[str]:
        """Command line of SGLang's server; on a CPU with PyTorch's operators and a cache of fixed size."""
        command = [
            *start.module("sglang.launch_server"),
            *("--model-path", str(start.model)),
            *("--host", start.host, "--port", str(start.port)),
            *("--dtype", start.dtype, "--random-seed", str(start.seed)),
            *("--context-length", str(start.context_length), "--max-running-requests", str(start.max_running)),
            "--skip-server-warmup",
            *(word for name, size in start.sizes.items() for word in (f"--{name}-size", str(size))),
            *(["--trust-remote-code"] if start.trust else []),
            *([SGLangBackend.experts_flag] if start.experts else []),
            *(start_options(start.images).flags if start.images else []),
        ]
        if start.certificate:
            command += ["--ssl-certfile", start.certificate, "--ssl-keyfile", start.private_key]
        if start.device == "cpu":
            tokens = start.max_running * start.context_length
            command += [
                *("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3"),
                *("--max-total-tokens", str(tokens), "--disable-overlap-schedule", "--sleep-on-idle"),
            ]
        return command

    def env(self, start: ServerStart) -> dict[str, str]:
        """Settings that turn off the network, since the model is local, and set the number of threads on a CPU."""
        threads = {"OMP_NUM_THREADS": str(start.threads)} if start.device == "cpu" and start.threads else {}
        return {"HF_HUB_OFFLINE": "1", **(start_options(start.images).env if start.images else {}), **threads}

    def for_images(self, reading: ImageReading) -> StartOptions:
        """As :func:`start_options` says."""
        return start_options(reading)

    def backend(self, url: str, timeout: float, access: Access = OPEN) -> SGLangBackend:
        """Connect to the server at ``url``."""
        return SGLangBackend(url, timeout, access)
