"""The pauses of a run's servers: renewed while they last, timed, and ended however the run ends.

Guarantees: a server that this run paused and did not resume yet is named to ``note`` before it is paused, so a process
that outlives this one can resume it; its lease, where it has one, is renewed for no longer than ``longest`` seconds;
:meth:`Pauses.close` resumes all of them. :func:`until_resumed` waits for whoever else paused a server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.inference.backend import Backend, InferenceError, PauseMode

RENEWALS = 3  # in the time of one lease
LOOK_SECONDS = 1.0  # between two looks at a server that another client paused: servers do not call back
END_SECONDS = 10.0  # for the answers of all servers that are resumed at the end of a run
Note = Callable[[Sequence[str]], None]
log = logging.getLogger(__name__)


@dataclass
class _Pause:
    """A paused server: the time of the answer to its pause, and the time up to which its lease is renewed."""

    backend: Backend
    since: float
    until: float


class Pauses:
    """Pauses and resumes the servers of one run.

    Args:
        note: Called with the URLs of all paused servers whenever they change, before a pause and after its end.
        longest: Seconds after which a pause is no longer renewed.
        clock: Returns seconds.
    """

    def __init__(
        self,
        note: Note = lambda urls: None,
        longest: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note = note
        self._longest = longest
        self._clock = clock
        self._held: dict[str, _Pause] = {}
        self._renewal: asyncio.Task[None] | None = None
        self.lost: set[str] = set()  # URLs of servers that did not renew their pause, so they may have gone on

    async def pause(self, backend: Backend, mode: PauseMode) -> None:
        """Stop a server's sampling until :meth:`resume`."""
        self.lost.discard(backend.url)
        self._held[backend.url] = pause = _Pause(backend, self._clock(), self._clock() + self._longest)
        self._note(list(self._held))
        await backend.pause(mode)
        pause.since, pause.until = self._clock(), self._clock() + self._longest
        self._begin_renewal()

    async def pause_again(self, backend: Backend, mode: PauseMode) -> None:
        """Stop a server again if its pause was not renewed, so that it may have gone on."""
        if backend.url in self.lost:
            await self.pause(backend, mode)

    def prolong(self, seconds: float) -> None:
        """Renew the leases of all paused servers for another time.

        Args:
            seconds: The time from now; infinite for as long as this run holds the pauses.
        """
        for pause in self._held.values():
            pause.until = self._clock() + seconds
        self._begin_renewal()

    def _begin_renewal(self) -> None:
        if self._leased() and (self._renewal is None or self._renewal.done()):
            self._renewal = asyncio.create_task(self._renew(), name="pause-renewal")

    def _leased(self) -> list[_Pause]:
        """Returns the pauses that have a lease which was not lost."""
        held = self._held.items()
        return [pause for url, pause in held if pause.backend.pause_lease is not None and url not in self.lost]

    async def resume(self, backend: Backend) -> float | None:
        """Let a server continue; returns the seconds since it was paused, ``None`` if this run did not pause it."""
        await backend.resume()
        pause = self._held.pop(backend.url, None)
        if pause is None:
            return None
        self._note(list(self._held))
        return self._clock() - pause.since

    async def close(self) -> None:
        """Resume all servers that are still paused; those that do not answer in time are left, and logged."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        left = [pause.backend for pause in self._held.values()]
        outcomes = await asyncio.gather(*(self._resume_in_time(backend) for backend in left), return_exceptions=True)
        for backend, outcome in zip(left, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                log.warning("%s may still be paused: %s", backend.url, outcome or type(outcome).__name__)

    async def _resume_in_time(self, backend: Backend) -> None:
        async with asyncio.timeout(END_SECONDS):
            await self.resume(backend)

    async def _renew(self) -> None:
        while held := self._leased():
            await asyncio.sleep(min(p.backend.pause_lease or 0.0 for p in held) / RENEWALS)
            for pause in held:
                if self._held.get(pause.backend.url) is pause:
                    await self._renew_one(pause)

    async def _renew_one(self, pause: _Pause) -> None:
        if self._clock() > pause.until:
            self.lost.add(pause.backend.url)
            return
        try:
            await pause.backend.renew()
        except InferenceError as error:
            if self._held.get(pause.backend.url) is pause:  # it was not resumed meanwhile
                log.warning("the pause of %s could not be renewed: %s", pause.backend.url, error)
                self.lost.add(pause.backend.url)


async def until_resumed(backend: Backend, seconds: float) -> bool:
    """Wait up to ``seconds`` until a server that someone else paused goes on; returns whether it does.

    Servers do not tell who paused them. One that is paused for longer than any push may last was left by a client that
    died, and whoever connects next may resume it.
    """
    if not await backend.paused():
        return True
    log.warning(
        "%s is paused: a run sends it weights, or ended in the middle of that; it is resumed in at most %g s",
        backend.url,
        seconds,
    )
    try:
        async with asyncio.timeout(seconds):
            while await backend.paused():
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        return False
    return True
