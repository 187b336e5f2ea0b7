"""HTTP routes by which worker processes reach the controller.

Guarantees: a call without the run's secret is refused; a worker that was given up is told so with HTTP 410, and does
not go on with what others do by now; a waiting call ends with its connection, which shows that a worker died.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.inference.router import Router
from agentrl.rollout.http_api import has_secret
from agentrl.rollout.worker_processes import WorkerLost, WorkerProcesses
from agentrl.rollout.worker_wire import ended_from_bytes, to_json

LONGEST_POLL = 60.0


def worker_routes(workers: WorkerProcesses, router: Router, secret: str) -> Sequence[Route]:
    """Builds the routes of worker processes.

    Args:
        workers: The workers of the run.
        router: Router of the controller, which is told of servers that a worker found dead.
        secret: Bearer token that callers must send; empty for none.
    """

    async def join(request: Request) -> Any:
        body = json.loads(await request.body())
        return {"worker": workers.join(body["name"], body["pid"])}

    async def poll(request: Request) -> Any:
        body = json.loads(await request.body())
        seconds = min(body["seconds"], LONGEST_POLL)
        answer = asyncio.create_task(workers.poll(body["worker"], body["seen"], body["servers_seen"], seconds))
        gone = asyncio.ensure_future(request.receive())  # after its body, a request only says that its connection broke
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                workers.cut_off(body["worker"])
                return {}
            return answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def ended(request: Request) -> Any:
        delivered, more = ended_from_bytes(await request.body())
        workers.ended(more["worker"], delivered, more["abandoned"])
        return {}

    async def ages(request: Request) -> Any:
        body = json.loads(await request.body())
        workers.aged(body["worker"], dict(body["ages"]))
        return {}

    async def beat(request: Request) -> Any:
        body = json.loads(await request.body())
        workers.heard(body["worker"], body["abandoned"])
        return {}

    async def report(request: Request) -> Any:
        body = json.loads(await request.body())
        workers.heard(body["worker"])
        router.report(body["url"], body["number"], body["reason"])
        return {}

    async def leave(request: Request) -> Any:
        workers.leave(json.loads(await request.body())["worker"])
        return {}

    def route(call: Callable[[Request], Awaitable[Any]]) -> Route:
        async def answer(request: Request) -> Response:
            if not has_secret(request, secret):
                return Response("wrong or missing secret", status_code=401, media_type="text/plain")
            try:
                return Response(to_json(await call(request)), media_type="application/json")
            except WorkerLost as error:
                return Response(str(error), status_code=410, media_type="text/plain")
            except asyncio.CancelledError:  # the server is being stopped
                return Response("the controller is stopping", status_code=503, media_type="text/plain")
            except (LookupError, TypeError, ValueError) as error:
                return Response(f"{type(error).__name__}: {error}", status_code=400, media_type="text/plain")

        return Route(f"/workers/{call.__name__}", answer, methods=["POST"])

    return [route(call) for call in (join, poll, ended, ages, beat, report, leave)]
