"""The web application behind the page: files, questions and the events of living runs.

Guarantees: every answer is JSON or one of the page's own files; what cannot be answered is a message with status 400.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.config.errors import UserError
from agentrl.view import page_files
from agentrl.view.access import Door, Keys
from agentrl.view.answers import Answers, whole
from agentrl.view.episode_files import KINDS, episode_file
from agentrl.view.metric_history import FILE as METRICS
from agentrl.view.shown_runs import ShownRun

POLL_SECONDS = 0.5  # between two looks at a run's files
BEAT_SECONDS = 15.0  # between two events of a run in which nothing happens
PARTS = 20  # of a long file, after each of which its reader is told
OWNER = "owner.json"

Answer = Callable[[Request], Any]


def application(runs: list[ShownRun], keys: Keys, poll_seconds: float = POLL_SECONDS) -> Door:
    """Builds the application.

    Args:
        runs: The shown runs.
        keys: Token and cookie.
        poll_seconds: Seconds between two looks at a run's files.
    """
    answers = Answers(runs)

    def on(path: str, answer: Answer) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                found = await run_in_threadpool(answer, request)
            except UserError as error:
                return _json({"error": str(error)}, 400)
            return _json(found)

        return Route(path, endpoint)

    def events(request: Request) -> Response:
        try:
            run = answers.run(request.path_params["run"])
        except UserError as error:
            return _json({"error": str(error)}, 400)
        return StreamingResponse(run_events(run, request.is_disconnected, poll_seconds), media_type="text/event-stream")

    def of(request: Request) -> tuple[str, str, int]:
        found = request.path_params
        return found["run"], found["kind"], found["place"]

    routes = [
        Route("/", lambda request: HTMLResponse(page_files.document())),
        Route("/view.js", lambda request: Response(page_files.script(), media_type="text/javascript")),
        Route("/view.css", lambda request: Response(page_files.style(), media_type="text/css")),
        on("/api/runs", lambda request: answers.list_runs()),
        on("/api/compare", lambda request: answers.compare_evaluations(request.query_params)),
        on("/api/task", lambda request: answers.task(request.query_params)),
        on("/api/runs/{run}", lambda request: answers.overview(request.path_params["run"])),
        on("/api/runs/{run}/findings", lambda request: answers.findings(request.path_params["run"])),
        on("/api/runs/{run}/curves", lambda r: answers.curves(r.path_params["run"], r.query_params.getlist("name"))),
        on("/api/runs/{run}/episodes", lambda r: answers.episodes(r.path_params["run"], r.query_params)),
        on("/api/runs/{run}/evaluations", lambda request: answers.evaluations(request.path_params["run"])),
        on(
            "/api/runs/{run}/group",
            lambda r: answers.group(
                r.path_params["run"], r.query_params.get("kind", "train"), r.query_params.get("id", "")
            ),
        ),
        on("/api/runs/{run}/{kind}/{place:int}", lambda request: answers.episode(*of(request))),
        on("/api/runs/{run}/{kind}/{place:int}/tokens", lambda request: answers.tokens(*of(request))),
        on(
            "/api/runs/{run}/{kind}/{place:int}/text",
            lambda r: answers.text(*of(r), r.query_params.get("role", ""), whole(r.query_params.get("node", ""))),
        ),
        Route("/api/runs/{run}/events", events),
    ]
    return Door(Starlette(routes=routes), keys)


def _json(found: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(found), status, media_type="application/json")


async def run_events(run: ShownRun, gone: Callable[[], Any], poll_seconds: float) -> AsyncIterator[bytes]:
    """Yields a server-sent event whenever a run has written: its state and its newest metrics.

    Args:
        run: The run.
        gone: Coroutine function that says whether the reader has gone.
        poll_seconds: Seconds between two looks at the files.
    """
    loop = asyncio.get_running_loop()
    seen: tuple[Any, ...] = ()
    told = 0.0
    while not await gone():
        now = await run_in_threadpool(_written, run)
        if now != seen or loop.time() - told > BEAT_SECONDS:
            await run_in_threadpool(_read_new, run)
            seen, told = now, loop.time()
            event = {"summary": await run_in_threadpool(run.summary), "latest": run.history.latest()}
            yield b"data: " + orjson.dumps(event) + b"\n\n"
        await asyncio.sleep(poll_seconds)


def _written(run: ShownRun) -> tuple[Any, ...]:
    """Returns what changes when a run writes: sizes, its launcher's record, and how much of its episodes is read."""
    metrics, owner = run.folder / METRICS, run.folder / OWNER
    sizes = [episode_file(run.folder, kind).size() for kind in KINDS]
    changed = owner.stat().st_mtime if owner.is_file() else 0.0
    read = round(PARTS * run.index.unread() / max(1, sum(sizes)))
    return (metrics.stat().st_size if metrics.is_file() else 0, *sizes, changed, read)


def _read_new(run: ShownRun) -> None:
    run.history.update()
    run.index.update(new_only=True)
