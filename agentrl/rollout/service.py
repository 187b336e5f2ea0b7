"""The controller's four calls over HTTP, for the trainer: ``next_batch``, ``publish``, ``checkpoint``, ``heartbeat``.

Guarantees: a call without the run's secret is refused; a failure of the rollouts or of a weight push is an answer with
its reason (HTTP 409), not a broken connection.
"""

import hmac
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.core.weights import WeightManifest
from agentrl.rollout.controller import Controller, RolloutError
from agentrl.rollout.weights import WeightPushError


def make_app(controller: Controller, secret: str) -> Starlette:
    """The controller's web application.

    Args:
        controller: What answers.
        secret: Bearer token that callers must show; empty for none.
    """

    async def call(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if secret and not hmac.compare_digest(given, secret):
            return _json({"error": "wrong or missing secret"}, 401)
        try:
            body = orjson.loads(await request.body())
            return _json(await _dispatch(controller, request.url.path, body))
        except (RolloutError, WeightPushError) as error:
            return Response(str(error), status_code=409, media_type="text/plain")
        except (KeyError, TypeError, ValueError) as error:
            return _json({"error": f"{type(error).__name__}: {error}"}, 400)

    names = ("next_batch", "publish", "checkpoint", "heartbeat")
    return Starlette(routes=[Route(f"/{name}", call, methods=["POST"]) for name in names])


async def _dispatch(controller: Controller, path: str, body: dict[str, Any]) -> Any:
    if path == "/next_batch":
        return await controller.next_batch(body["step"])
    if path == "/publish":
        manifest = WeightManifest.model_validate(body["manifest"])
        await controller.publish(manifest, body["metrics"], final=body["final"])
        return {"version": manifest.version}
    if path == "/checkpoint":
        return controller.checkpoint()
    controller.heartbeat(done=body["done"])
    return {}


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")
