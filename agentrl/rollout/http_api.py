"""HTTP API of the controller: the trainer's calls, and ``/servers`` and ``/status`` for the command line.

Guarantees: a call without the run's secret is refused; a failure of the rollouts, of an evaluation or of a weight push
is answered with HTTP 409 and the reason, not with a broken connection; no call waits for the end of an evaluation.
"""

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.weight_manifest import WeightManifest
from agentrl.inference.backend import InferenceError
from agentrl.rollout.controller import Controller
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.run_status import TrainerCalls, run_status
from agentrl.rollout.server_pool import ServerPool
from agentrl.weights.transaction import WeightPushError


def make_app(controller: Controller, server_pool: ServerPool, secret: str, more: Sequence[Route] = ()) -> Starlette:
    """Builds the controller's web application.

    Args:
        controller: Controller that answers the calls.
        server_pool: Servers that can be listed, added and removed.
        secret: Bearer token that callers must send; empty for none.
        more: Routes of others.
    """
    calls = TrainerCalls()

    async def call(request: Request) -> Response:
        if not has_secret(request, secret):
            return _json({"error": "wrong or missing secret"}, 401)
        try:
            body = orjson.loads(await request.body() or b"{}")
            if request.url.path == "/servers":
                return _json(await _servers(server_pool, request.method, body))
            if request.url.path == "/status":
                return _json(run_status(controller, server_pool.status(), calls))
            with calls.noted(request.url.path[1:]):
                if request.url.path == "/next_batch":
                    return Response(await controller.next_batch(body["step"]), media_type="application/octet-stream")
                if request.url.path == "/checkpoint":
                    return Response(await controller.checkpoint(), media_type="application/octet-stream")
                return _json(await _dispatch(controller, request.url.path, body))
        except (RolloutError, WeightPushError, InferenceError) as error:
            return Response(str(error), status_code=409, media_type="text/plain")
        except asyncio.CancelledError:  # the server is being stopped
            return Response("the controller is stopping", status_code=503, media_type="text/plain")
        except (LookupError, TypeError, ValueError) as error:
            return _json({"error": f"{type(error).__name__}: {error}"}, 400)

    names = ("next_batch", "ready", "members", "publish", "record", "checkpoint", "heartbeat")
    routes = [Route(f"/{name}", call, methods=["POST"]) for name in names]
    routes.append(Route("/status", call, methods=["GET"]))
    routes.append(Route("/servers", call, methods=["GET", "POST", "DELETE"]))
    return Starlette(routes=[*routes, *more])


def has_secret(request: Request, secret: str) -> bool:
    """Whether a request carries the secret as a bearer token; always where there is no secret."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return not secret or hmac.compare_digest(given.encode(), secret.encode())  # text other than ASCII is refused too


async def _servers(server_pool: ServerPool, method: str, body: dict[str, Any]) -> Any:
    if method == "POST":
        await server_pool.add(body["url"])
    elif method == "DELETE":
        server_pool.remove(body["url"])
    return server_pool.status()


async def _dispatch(controller: Controller, path: str, body: dict[str, Any]) -> Any:
    if path == "/members":
        return await controller.members()
    if path == "/publish":
        manifest = WeightManifest.model_validate(body["manifest"])
        await controller.publish(manifest, final=body["final"])
        return {"version": manifest.version}
    if path == "/ready":
        ready = await controller.ready(body["seconds"], version=body.get("version"), final=body.get("final", False))
        return {"ready": ready}
    if path == "/record":
        controller.record(body["step"], body["metrics"], final=body["final"])
        return {}
    controller.heartbeat(done=body["done"])
    return {}


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")
