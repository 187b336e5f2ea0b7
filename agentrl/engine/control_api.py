"""HTTP handlers of the control plane: pause and resume, aborts, weights, versions, health and server information.

Guarantees: ``/health`` and ``/ready`` answer without waiting for the loop thread; every other control call happens
between two model steps, in the order of arrival.
"""

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrl.engine.engine import PAUSE_MODES
from agentrl.engine.params import BadRequestError, boolean, integer, number
from agentrl.engine.responses import error_response, json_body, json_response
from agentrl.engine.service import Service, settled
from agentrl.engine.weight_store import DIGESTS, digests, parameter_json


def service_of(http: HttpRequest) -> Service:
    """Returns the service that answers a request."""
    return http.app.state.service


def text(key: str, value: object) -> str:
    """Returns a non-empty string, or raises BadRequestError."""
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{key} must be a non-empty string, got {value!r:.80}")
    return value


def version_label(value: object) -> str | None:
    """Returns a weight version as a string, from a string or an integer; ``None`` if absent."""
    if value is None:
        return None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text("weight_version", value)


async def pause(http: HttpRequest) -> Response:
    """Handle ``POST /pause_generation {mode, lease_seconds, holder}``; without a lease it pauses until resumed."""
    body = await json_body(http, optional=True)
    mode = body.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise BadRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r:.80}")
    seconds = None if body.get("lease_seconds") is None else lease_seconds(body)
    await settled(service_of(http).engine.pause(mode, holder(body), seconds))
    return json_response({"status": "ok", "message": f"Generation paused ({mode})."})


async def renew(http: HttpRequest) -> Response:
    """Handle ``POST /renew_pause {lease_seconds, holder}``: 409 if the holder's pause has ended."""
    body, engine = await json_body(http), service_of(http).engine
    name, seconds = text("holder", body.get("holder")), lease_seconds(body)
    await settled(engine.call(lambda: engine.lease.renew(name, seconds)))
    return json_response({"status": "ok", "message": "The lease was renewed."})


def lease_seconds(body: dict[str, object]) -> float:
    """The length of a lease, or BadRequestError."""
    return number("lease_seconds", body.get("lease_seconds"), 0.0, 86400.0, open_low=True)


def holder(body: dict[str, object]) -> str:
    """The name of a lease's holder; empty if the client gives none."""
    return text("holder", body["holder"]) if body.get("holder") is not None else ""


async def resume(http: HttpRequest) -> Response:
    """Handle ``POST /continue_generation {holder}``; 409 while the lease of another holder runs."""
    await settled(service_of(http).engine.resume(holder(await json_body(http, optional=True))))
    return json_response({"status": "ok", "message": "Generation continued."})


async def abort(http: HttpRequest) -> Response:
    """Handle ``POST /abort_request {rid}`` or ``{abort_all: true}``; unknown ids are ignored."""
    body = await json_body(http)
    everything = boolean("abort_all", body.get("abort_all", False))
    rid = body.get("rid") or ""
    if not isinstance(rid, str):
        raise BadRequestError(f"rid must be a string, got {rid!r:.80}")
    if rid or everything:
        await settled(service_of(http).engine.abort(rid, everything=everything))
    return Response(status_code=200)


async def update_from_disk(http: HttpRequest) -> Response:
    """Handle ``POST /update_weights_from_disk``."""
    body, service = await json_body(http), service_of(http)
    folder = text("model_path", body.get("model_path"))
    boolean("flush_cache", body.get("flush_cache", True))
    abort_all = boolean("abort_all_requests", body.get("abort_all_requests", False))
    version = version_label(body.get("weight_version"))
    start = time.perf_counter()
    read = await settled(service.engine.load(folder, version, abort_all=abort_all))
    return json_response(
        {"success": True, "message": f"Loaded {read} bytes from {folder}.", "seconds": time.perf_counter() - start}
    )


async def update_version(http: HttpRequest) -> Response:
    """Handle ``POST /update_weight_version {new_version, abort_all_requests=true}``: change the label only."""
    body, engine = await json_body(http), service_of(http).engine
    version = version_label(body.get("new_version"))
    if version is None:
        raise BadRequestError("new_version is missing")
    if boolean("abort_all_requests", body.get("abort_all_requests", True)):
        await settled(engine.abort(everything=True))
    await settled(engine.call(lambda: setattr(engine, "version", version)))
    return json_response({"success": True, "message": f"Weight version is {version}.", "new_version": version})


async def weights_checker(http: HttpRequest) -> Response:
    """Handle ``POST /weights_checker {action: checksum | fingerprint}``."""
    action = (await json_body(http)).get("action")
    if not isinstance(action, str) or action not in DIGESTS:
        raise BadRequestError(f"action must be one of {', '.join(DIGESTS)}, got {action!r:.80}")
    service = service_of(http)
    model = service.loaded.model
    adapter = service.engine.adapter
    found = await settled(service.engine.call(lambda: digests(model, action) | adapter.digests(action)))
    return json_response({"success": True, f"{action}s": found, "weight_version": service.engine.version})


async def get_weights(http: HttpRequest) -> Response:
    """Handle ``POST /get_weights_by_name {name, truncate_size=100}``."""
    body, service = await json_body(http), service_of(http)
    name = text("name", body.get("name"))
    size = integer("truncate_size", body.get("truncate_size", 100), 0, 2**31 - 1)
    model = service.loaded.model
    return json_response(await settled(service.engine.call(lambda: parameter_json(model, name, size))))


async def flush_cache(http: HttpRequest) -> Response:
    """Handle ``/flush_cache``: empty the prefix cache; 400 while requests run or wait."""
    engine = service_of(http).engine
    if await settled(engine.call(engine.flush)):
        return json_response({"success": True, "message": "Cache flushed."})
    return error_response("requests are running or waiting; the cache was not flushed", 400)


async def health(http: HttpRequest) -> Response:
    """Handle ``GET /health``: 200 while the loop thread lives and has its model."""
    engine = service_of(http).engine
    if engine.alive and engine.ready.done():
        return json_response({"status": "ok"})
    return error_response("the engine's loop is not running" if engine.ready.done() else "the model is loading", 503)


async def ready(http: HttpRequest) -> Response:
    """Handle ``GET /ready``: 503 while loading or paused."""
    engine = service_of(http).engine
    if not engine.ready.done() or not engine.alive:
        return error_response("the model is not loaded", 503)
    if engine.paused:
        return error_response("generation is paused", 503)
    return json_response({"status": "ready"})


async def model_info(http: HttpRequest) -> Response:
    """Handle ``GET /model_info``."""
    service = service_of(http)
    loaded = service.loaded
    return json_response(
        {
            "model_path": service.model_path,
            "tokenizer_path": service.model_path,
            "is_generation": True,
            "weight_version": service.engine.version,
            "load_format": "auto",
            "dtype": loaded.dtype,
            "vocab_size": loaded.vocab_size,
            "context_length": loaded.context_length,
            "eos_token_ids": sorted(loaded.eos_ids),
            "has_chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        }
    )


async def server_info(http: HttpRequest) -> Response:
    """Handle ``GET /server_info``; works while paused."""
    service, engine = service_of(http), service_of(http).engine
    loaded, runner = service.loaded, engine.runner
    return json_response(
        {
            "engine": "agentrl",
            "model_path": service.model_path,
            "dtype": loaded.dtype,
            "device": str(loaded.device),
            "context_length": loaded.context_length,
            "max_running_requests": engine.scheduler.max_running,
            "max_waiting_requests": engine.max_waiting,
            "packed_linears": len(runner.packed) if runner.packed is not None else 0,
            "operators": runner.fast.operators.name if runner.fast is not None else "the model's own",
            "past": runner.past,
            "weight_version": engine.version,
            "paused": engine.paused,
            "pause_holder": engine.lease.holder,
            "pause_lease_seconds": engine.lease.left(),
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "prefills": runner.prefills,
            "decode_steps": runner.decodes,
            "failed_steps": engine.failed_steps,
            "cache_bytes": runner.cache.nbytes,
            "max_tokens": engine.scheduler.max_tokens or engine.scheduler.max_running * loaded.context_length,
            "kept_tokens": runner.kept.tokens,
            "reused_tokens": runner.kept.reused_tokens,
            "computed_prompt_tokens": runner.prefilled_tokens,
        }
    )
