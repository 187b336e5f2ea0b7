"""A simulated inference server with one device, behind the same protocol as a real one.

Guarantees: a simulated token stands for a stretch of tokens that one policy version sampled, and its id is their
number, so an answer of any length costs no more than a few list entries. A server that crashed refuses every call,
loses its running requests, and answers again after :data:`DOWN` seconds with the version that it had. A call that gets
no answer fails at the time limit of its connection.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest
from agentrl.inference.backend import Backend, Generation, PauseMode, SamplingParams, ServerUnreachable
from agentrl.sim.device import Device, Speed, Stretch
from agentrl.sim.faults import Crash, Faults, NoFaults, Place, suffer

DOWN = 60.0  # virtual seconds that a crashed server is down


class SimServer(Backend):
    """A simulated server.

    Args:
        url: Name in messages.
        speed: Speed of its device.
        slots: Most requests that it decodes at a time.
        load_seconds: Seconds that it takes to load new weights.
        faults: Faults of its calls.
    """

    def __init__(
        self,
        url: str,
        speed: Speed,
        *,
        slots: int | None = None,
        load_seconds: float = 0.0,
        faults: Faults | None = None,
    ) -> None:
        self.url = url
        self._speed = speed
        self.device = Device(speed, slots)
        self._load_seconds = load_seconds
        self._faults = faults or NoFaults()
        self._up_at = 0.0
        self._running: set[asyncio.Future[object]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Generate ``params.max_new_tokens`` tokens, fewer if a push aborts the request."""
        await self._answering("request")
        if self._speed.call:
            await asyncio.sleep(self._speed.call)
        await self._open.wait()
        work: asyncio.Task[list[Stretch]] = asyncio.ensure_future(self.device.generate(params.max_new_tokens))
        self._running.add(work)  # type: ignore[arg-type]
        try:
            made = await work
        except asyncio.CancelledError:
            if self._up():
                raise
            raise ServerUnreachable(f"{self.url} crashed") from None
        finally:
            self._running.discard(work)  # type: ignore[arg-type]
        await self._answering("answer")
        return _generation(made, params.max_new_tokens)

    async def alive(self) -> bool:
        """Whether the server is up."""
        return self._up()

    async def version(self) -> int:
        """Policy version of the loaded weights."""
        self._check()
        return self.device.version

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; ``abort`` also ends the running requests, others keep their tokens."""
        await self._answering("pause")
        self._open.clear()
        if mode == "abort":
            self.device.abort()
        self.device.pause()

    async def resume(self) -> None:
        """Continue sampling."""
        await self._answering("resume")
        self.device.resume()
        self._open.set()

    async def load(self, path: str, version: int) -> None:
        """Take a new version."""
        await self._answering("load")
        if self._load_seconds:
            await asyncio.sleep(self._load_seconds)
        self.device.set_version(version)

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        """Take a new version that the trainer broadcasts."""
        await self.load("", manifest.version)

    async def ranks(self) -> int:
        """Returns 1."""
        return 1

    async def verify(self, manifest: WeightManifest) -> list[str]:
        """Returns no differences."""
        await self._answering("verify")
        return []

    async def close(self) -> None:
        """There are no connections."""

    def _up(self) -> bool:
        return asyncio.get_running_loop().time() >= self._up_at

    def _check(self) -> None:
        if not self._up():
            raise ServerUnreachable(f"{self.url} is down", never_sent=True)

    async def _answering(self, place: Place) -> None:
        """Wait as the faults say.

        Raises:
            ServerUnreachable: The server is down, crashes now, or gives no answer.
        """
        self._check()
        try:
            async with asyncio.timeout(self._faults.durations.call):
                await suffer(self._faults, place)
        except Crash as crash:
            self._crash()
            raise ServerUnreachable(f"{self.url}: {crash}") from crash
        except TimeoutError as error:
            raise ServerUnreachable(f"{self.url} gave no answer", timed_out=True) from error

    def _crash(self) -> None:
        self._up_at = asyncio.get_running_loop().time() + DOWN
        for work in self._running:
            work.cancel()
        self.device.resume()
        self._open.set()


def _generation(made: Sequence[Stretch], wanted: int) -> Generation:
    counts = [stretch.tokens for stretch in made]
    finish: Literal["stop", "abort"] = "stop" if sum(counts) >= wanted else "abort"
    return Generation(counts, [-1.0] * len(counts), [stretch.version for stretch in made], finish)
