"""Routes episodes to servers: sticky sessions, least load, and servers that join and leave.

Guarantees: an episode stays on its server (prefix cache) while that server lives and is not removed; a server that dies
or hangs is noticed by a probe or a failed request and taken out, and its requests are sent to another server; a request
that was not answered in time is sent once more, to the least loaded server; no
request waits for a server longer than ``patience`` seconds. A server gets traffic only after the caller of
:meth:`Router.admit` has given it the current weights. Reserved servers serve evaluation alone, and evaluation is served
by them alone, while there are servers of both sorts.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from agentrl.inference.backend import Backend, Generation, InferenceError, SamplingParams, ServerUnreachable

T = TypeVar("T")
MISSED_PROBES = 3  # in a row, after which a server is taken out
TIMED_OUT_RETRIES = 1  # of one request: it may be what takes the time
log = logging.getLogger(__name__)


class NoServer(InferenceError):
    """No server can take requests."""


@dataclass(eq=False)  # an entry is itself alone
class _Server:
    backend: Backend
    number: int  # of its admission
    sessions: int = 0
    leaving: bool = False  # removed: keeps its running requests only
    reserved: bool = False  # keeps an older version, for evaluation
    missed: int = 0
    error: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[asyncio.Task[Any], bool] = field(default_factory=dict)  # value: cancelled because the server is gone
    rejoining: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return not self.leaving and not self.gone.is_set()


@dataclass(frozen=True)
class ServerStatus:
    """State of one server: ``state`` is ``serving``, ``reserved``, ``leaving`` or ``gone``.

    ``sessions`` is the number of open sessions; ``None`` where other processes open them. ``number`` is that of its
    admission: a server that was taken out and came back has another one.
    """

    url: str
    state: str
    sessions: int | None
    error: str
    number: int


def _state(server: _Server) -> str:
    if server.gone.is_set():
        return "gone"
    return "leaving" if server.leaving else "reserved" if server.reserved else "serving"


class Router:
    """Chooses a server of one policy for each episode.

    Args:
        backends: Servers that hold the current weights.
        probe_seconds: Seconds between two health probes of a server.
        patience: Seconds that a request waits while no server can take it.
    """

    def __init__(self, backends: Iterable[Backend], *, probe_seconds: float = 5.0, patience: float = 60.0) -> None:
        self._admissions = count(1)
        self._servers = {backend.url: _Server(backend, next(self._admissions)) for backend in backends}
        self._probe_seconds = probe_seconds
        self._patience = patience
        self._retired: list[Backend] = []  # replaced by another connection to the same server
        self._arrived = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.rejoin: Callable[[Backend], Awaitable[None]] | None = None  # gives a server that is back current weights
        self.sessions_elsewhere = False  # whether other processes open sessions on the servers
        self.changed: Callable[[], None] = lambda: None  # called when the state of a server changed

    @property
    def backends(self) -> list[Backend]:
        """Servers that live and are neither removed nor reserved: those that a weight push is for."""
        return [server.backend for server in self._servers.values() if server.usable and not server.reserved]

    def reserve(self) -> list[Backend]:
        """Keep a quarter of the servers, at least one of two, for evaluation; returns them, the least loaded first.

        A single server is not reserved. :meth:`admit` or :meth:`release_reserved` ends the reservation.
        """
        usable = sorted(self._usable(evaluation=False), key=lambda server: server.sessions)
        chosen = usable[: max(1, len(usable) // 4)] if len(usable) > 1 else []
        for server in chosen:
            self.keep(server.backend)
        return [server.backend for server in chosen]

    def keep(self, backend: Backend) -> None:
        """Keep a server for evaluation."""
        self._servers[backend.url].reserved = True
        self.changed()

    def release_reserved(self, backend: Backend) -> None:
        """Let a reserved server serve training again; the caller makes sure that it holds the current weights."""
        self._servers[backend.url].reserved = False
        self.changed()

    def bring_back(self, backend: Backend, reason: str) -> None:
        """Take out a reserved server, and bring it back with the current weights as one that was dead."""
        server = self._servers[backend.url]
        if server.reserved and not server.gone.is_set():
            self.take_out(backend, reason)
            server.rejoining = asyncio.create_task(self._rejoin(server))

    def status(self) -> list[ServerStatus]:
        """State of all servers."""
        return [
            ServerStatus(
                url=url,
                state=_state(server),
                sessions=None if self.sessions_elsewhere else server.sessions,
                error=server.error,
                number=server.number,
            )
            for url, server in self._servers.items()
        ]

    def lease(self, *, evaluation: bool = False) -> "Lease":
        """Returns a lease for one episode; its first request chooses the least loaded server."""
        return Lease(self, evaluation=evaluation)

    def admit(self, backend: Backend) -> None:
        """Let a server take requests; the caller makes sure that it holds the current weights."""
        old = self._servers.get(backend.url)
        if old is not None and old.backend is not backend:
            self._retired.append(old.backend)
        # leases of the old entry move here with their next request
        self._servers[backend.url] = _Server(backend, next(self._admissions))
        self._arrived.set()
        self.changed()

    def remove(self, url: str) -> None:
        """Send a server no new requests; its running requests may end.

        Raises:
            LookupError: There is no such server.
        """
        if url not in self._servers:
            raise LookupError(f"no server {url}; there are {sorted(self._servers)}")
        self._servers[url].leaving = True
        self.changed()

    def take_out(self, backend: Backend, reason: str) -> None:
        """Mark a server as dead and send its requests to other servers."""
        server = self._servers.get(backend.url)
        if server is not None and not server.gone.is_set():
            log.warning("%s is taken out: %s", backend.url, reason)
            server.error = reason
            server.gone.set()
            for task in server.waiting:
                server.waiting[task] = True
                task.cancel()
            self.changed()

    async def ask(self, backend: Backend, call: Callable[[Backend], Awaitable[T]]) -> T:
        """Call one of the servers; a call that still waits when its server is taken out ends then.

        Raises:
            ServerUnreachable: The server gave no answer, or was taken out.
        """
        server = self._servers[backend.url]
        if server.gone.is_set():
            raise ServerUnreachable(f"{backend.url} was taken out: {server.error}")
        return await _while_it_lives(server, lambda one, _: call(one), "")

    def report(self, url: str, number: int, reason: str) -> None:
        """Take out a server that another process found dead, unless it was admitted anew since then."""
        server = self._servers.get(url)
        if server is not None and server.number == number:
            self.take_out(server.backend, reason)

    def start(self) -> None:
        """Probe the servers from now on."""
        self._watch = asyncio.create_task(self._probe_forever(), name="router-probes")

    async def close(self) -> None:
        """Stop probing, and close the connections to all servers."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        rejoining = [server.rejoining for server in self._servers.values() if server.rejoining is not None]
        for task in rejoining:
            task.cancel()
        await asyncio.gather(*rejoining, return_exceptions=True)
        for backend in [server.backend for server in self._servers.values()] + self._retired:
            await backend.close()

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._probe_seconds)
            await self.probe()

    async def probe(self) -> None:
        """Probe every server once; take out those that do not answer and readmit those that are back."""
        await asyncio.gather(*(self._probe_one(server) for server in list(self._servers.values())))

    async def _probe_one(self, server: _Server) -> None:
        if await server.backend.alive():
            server.missed = 0
            back = server.gone.is_set() and not server.leaving
            if back and server.rejoining is None:  # may take until the next push; the other probes do not wait
                server.rejoining = asyncio.create_task(self._rejoin(server))
                await asyncio.wait({server.rejoining}, timeout=self._probe_seconds)
            return
        server.missed += 1
        if server.missed >= MISSED_PROBES:
            self.take_out(server.backend, f"no answer to {server.missed} probes in a row")

    async def _rejoin(self, server: _Server) -> None:
        try:
            if self.rejoin is not None:
                await self.rejoin(server.backend)
        except InferenceError as error:
            server.error = f"it is back, but does not take the current weights: {error}"
        finally:
            server.rejoining = None

    def _usable(self, *, evaluation: bool) -> list[_Server]:
        """Usable servers of an episode; where none is of its sort, those of the other."""
        usable = [server for server in self._servers.values() if server.usable]
        own = [server for server in usable if server.reserved == evaluation]
        return own or usable

    def fits(self, server: _Server, *, evaluation: bool) -> bool:
        """Whether an episode may stay on a server."""
        if self._servers.get(server.backend.url) is not server:
            return False
        if server.reserved == evaluation:  # then it is among those of its sort, however many others there are
            return server.usable
        return server in self._usable(evaluation=evaluation)

    def _best(self, *, evaluation: bool) -> _Server | None:
        return min(self._usable(evaluation=evaluation), key=lambda server: server.sessions, default=None)

    async def pick(self, *, evaluation: bool = False) -> _Server:
        """Returns the least loaded usable server; waits up to ``patience`` seconds if there is none."""
        best = self._best(evaluation=evaluation)
        if best is not None:
            return best
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    self._arrived.clear()
                    best = self._best(evaluation=evaluation)
                    if best is not None:
                        return best
                    await self._arrived.wait()
        except TimeoutError:
            states = "; ".join(f"{s.url} {s.state}: {s.error or 'removed'}" for s in self.status())
            raise NoServer(f"no inference server for {self._patience:g} s (inference.patience): {states}") from None


class Lease:
    """Connection of one episode: a :class:`~agentrl.inference.backend.Sampler` that replaces a server that is gone."""

    def __init__(self, router: Router, *, evaluation: bool = False) -> None:
        self._router = router
        self._evaluation = evaluation
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        """URL of the episode's current server."""
        return self._server.backend.url if self._server else "no server yet"

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation on this episode's server, or on another one if that is gone.

        Raises:
            NoServer: No server can be used.
        """
        return await self._ask(lambda backend, name: backend.generate(token_ids, params, request_id=name), request_id)

    async def score(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs of given tokens, see :meth:`Backend.score`; servers and errors as in :meth:`generate`."""
        return await self._ask(lambda backend, _: backend.score(token_ids, start), uuid.uuid4().hex)

    async def _ask(self, question: Callable[[Backend, str], Awaitable[T]], request_id: str) -> T:
        broken, timeouts = False, 0
        while True:
            server = await self._place()
            try:
                return await _while_it_lives(server, question, request_id)
            except ServerUnreachable as error:
                timeouts += error.timed_out
                if timeouts > TIMED_OUT_RETRIES:
                    raise
                if not server.gone.is_set():
                    if not await server.backend.alive():
                        self._router.take_out(server.backend, str(error))
                    elif error.timed_out:
                        self.release()  # it lives, and may be overloaded: the least loaded one is asked next
                    elif broken:
                        raise  # the server lives and failed twice: the request is the cause
                    broken = True
                request_id = uuid.uuid4().hex  # a server may still hold a request with the old id

    async def _place(self) -> _Server:
        if self._server is None or not self._router.fits(self._server, evaluation=self._evaluation):
            self.release()
            self._server = await self._router.pick(evaluation=self._evaluation)
            self._server.sessions += 1
        return self._server

    def release(self) -> None:
        """End the lease."""
        if self._server is not None:
            self._server.sessions -= 1
            self._server = None


async def _while_it_lives(server: _Server, question: Callable[[Backend, str], Awaitable[T]], request_id: str) -> T:
    """Returns the server's answer; raises as soon as the server is taken out, which cancels this task."""
    task = asyncio.current_task()
    assert task is not None
    cancelling = task.cancelling()
    server.waiting[task] = False
    try:
        return await question(server.backend, request_id)
    except asyncio.CancelledError:
        if not server.waiting[task] or task.uncancel() > cancelling:
            raise  # the task was also cancelled by someone else
        raise ServerUnreachable(f"{server.backend.url} was taken out: {server.error}") from None
    finally:
        del server.waiting[task]
