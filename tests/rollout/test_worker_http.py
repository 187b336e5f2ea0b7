"""A worker's calls over HTTP: the run's secret, a broken connection, and what the worker knows of the servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from agentrl.inference.router import Router
from agentrl.rollout import worker_link
from agentrl.rollout.followed_servers import FollowedServers, servers_as_json
from agentrl.rollout.worker_api import worker_routes
from agentrl.rollout.worker_link import HttpLink
from agentrl.rollout.worker_loop import WorkerLoop, WorkerRefused
from agentrl.rollout.worker_processes import AWAY_SECONDS, LOOK_SECONDS, WorkerProcesses
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.worker_fakes import Clock, Runs, order

SECRET = "s3cret"


def backend(url: str) -> FakeBackend:
    return FakeBackend(lambda ids, params: answer([7]), url)


class Controlling:
    """A controller's side that listens on a port."""

    def __init__(self, router: Router | None) -> None:
        self.clock = Clock()
        self.router = router or Router([backend("http://a"), backend("http://b")])
        self.workers = WorkerProcesses(8, 1.0, 60.0, lambda: servers_as_json(self.router), clock=self.clock)
        self.router.changed = self.workers.servers_changed
        self.url = ""

    def after(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.clock.now += LOOK_SECONDS
            self.workers.look()


@asynccontextmanager
async def controlling(router: Router | None = None, seconds: float = 30.0) -> AsyncIterator[Controlling]:
    made = Controlling(router)
    app = Starlette(routes=worker_routes(made.workers, made.router, SECRET))
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    socket = config.bind_socket()
    serving = asyncio.create_task(server.serve([socket]))
    while not server.started:
        await asyncio.sleep(0.01)
    made.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        async with asyncio.timeout(seconds):
            yield made
    finally:
        await made.workers.close()
        server.should_exit = True
        await serving


class Remote:
    """A worker that calls over HTTP."""

    def __init__(self, link: HttpLink, first: int = 0) -> None:
        self.runs = Runs()
        self.router = Router([], patience=1.0)
        self.servers = FollowedServers(self.router, backend, first, lambda *report: self.loop.report(*report))
        self.loop = WorkerLoop(link, self.runs, self.servers.follow)
        self.serving = asyncio.create_task(self.loop.serve())

    async def end(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


async def test_episodes_run_over_http_and_the_end_of_the_run_ends_the_worker() -> None:
    async with controlling() as made, HttpLink(made.url, SECRET, "a", 1) as link:
        await link.join()
        worker = Remote(link)
        found = await asyncio.gather(*(made.workers.run(order(number)) for number in range(10)))
        assert [one.seed for one in found] == list(range(10)) and found[3].trajectories["assistant"].nodes
        await made.workers.close()
        await worker.serving


@pytest.mark.parametrize("secret", ["", "wrong", "S3CRET", "s3crét"])
async def test_a_wrong_secret_is_refused(secret: str) -> None:
    async with controlling() as made:
        async with HttpLink(made.url, secret, "a", 1) as link:
            with pytest.raises(WorkerRefused, match="401: wrong or missing secret"):
                await link.join()
        async with httpx.AsyncClient(base_url=made.url) as http:
            for path in ("join", "poll", "ended", "ages", "beat", "report", "leave"):
                given = {"authorization": f"Bearer {secret}".encode()} if secret else {}
                assert (await http.post(f"/workers/{path}", content=b"{}", headers=given)).status_code == 401
        assert made.workers.in_flight == {}


async def test_calls_that_make_no_sense_are_answered_with_the_reason() -> None:
    async with controlling() as made, httpx.AsyncClient(base_url=made.url) as http:
        http.headers["authorization"] = f"Bearer {SECRET}"
        for path, body, status in (
            ("join", b"no json", 400),
            ("ended", b"no safetensors", 400),
            ("beat", b'{"worker": 5, "abandoned": 0}', 410),
        ):
            assert (await http.post(f"/workers/{path}", content=body)).status_code == status


async def test_a_broken_connection_shows_that_a_worker_died() -> None:
    async with controlling() as made:
        async with HttpLink(made.url, SECRET, "a", 1) as link:
            await link.join()
            poll = asyncio.create_task(link.poll(0, 0, 20.0))
            assert [one["url"] for one in (await poll)["servers"]] == ["http://a", "http://b"]
            waiting = asyncio.create_task(link.poll(0, 1, 20.0))
            cut = asyncio.Event()
            worker = made.workers.heard(1)
            made.workers.cut_off = lambda number: (setattr(worker, "away", made.clock()), cut.set())  # type: ignore
            await asyncio.sleep(0.1)  # the call is on its way
            waiting.cancel()
            await cut.wait()
        made.after(AWAY_SECONDS + 2)
        assert made.workers.in_flight == {}


async def test_a_worker_gives_signs_of_life_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "BEAT_SECONDS", 0.01)
    async with controlling() as made, HttpLink(made.url, SECRET, "a", 1) as link:
        await link.join()
        told = asyncio.Event()
        heard = made.workers.heard

        def hear(number: int, abandoned: int | None = None) -> object:
            if abandoned == 4:
                told.set()
            return heard(number, abandoned)

        made.workers.heard = hear  # type: ignore[method-assign]
        link.beat(lambda: 4)
        await told.wait()
        assert made.workers.abandoned == 4


async def test_a_server_that_a_worker_finds_dead_is_taken_out_for_all_until_it_is_admitted_anew() -> None:
    async with (
        controlling() as made,
        HttpLink(made.url, SECRET, "a", 1) as first,
        HttpLink(made.url, SECRET, "b", 2) as second,
    ):
        await first.join()
        await second.join()
        a, b = Remote(first), Remote(second, first=1)
        await asyncio.gather(*(made.workers.run(order(number)) for number in range(4)))
        assert [one.url for one in a.router.status()] == ["http://a", "http://b"]
        assert [one.url for one in b.router.status()] == ["http://b", "http://a"], "it begins with the other one"
        a.router.take_out(a.router.backends[0], "no answer")
        changed = asyncio.Event()
        b_changed = b.router.changed
        b.router.changed = lambda: (b_changed(), changed.set())  # type: ignore[assignment]
        await changed.wait()
        assert [(one.url, one.state) for one in b.router.status()] == [("http://b", "serving"), ("http://a", "gone")]
        assert [one.state for one in made.router.status()] == ["gone", "serving"]
        changed.clear()
        made.router.admit(backend("http://a"))
        await changed.wait()
        assert {one.url for one in b.router.backends} == {"http://a", "http://b"}
        made.router.report("http://a", 1, "an old report")
        assert len(made.router.backends) == 2
        await a.end()
        await b.end()


async def test_a_removed_server_gets_no_new_episodes_of_a_worker() -> None:
    async with controlling() as made, HttpLink(made.url, SECRET, "a", 1) as link:
        await link.join()
        worker = Remote(link)
        await made.workers.run(order(0))
        changed = asyncio.Event()
        worker.router.changed = changed.set
        made.router.remove("http://a")
        await changed.wait()
        assert [one.url for one in worker.router.backends] == ["http://b"]
        await worker.end()


async def test_a_server_that_is_kept_for_an_evaluation_serves_nothing_else_in_the_workers() -> None:
    async with controlling() as made, HttpLink(made.url, SECRET, "a", 1) as link:
        await link.join()
        worker = Remote(link)
        await made.workers.run(order(0))

        async def state(change: Callable[[], object], wanted: list[str]) -> None:
            change()
            while [one.state for one in worker.router.status()] != wanted:
                await asyncio.sleep(0.01)

        (kept,) = made.router.reserve()
        await state(lambda: None, ["reserved", "serving"])
        for evaluation, url in ((True, "http://a"), (False, "http://b")):
            assert (await worker.router.pick(evaluation=evaluation)).backend.url == url
        await state(lambda: made.router.release_reserved(kept), ["serving", "serving"])
        await worker.end()
