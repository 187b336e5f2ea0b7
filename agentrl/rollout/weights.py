"""A weight push as a transaction over all servers: pause, load, verify, commit, resume.

Guarantees: either all servers hold the new version, verified, or all hold the last committed one; generation resumes
in both cases; the whole thing ends within the lease. Nothing is committed that a server did not confirm.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.core.weights import WeightManifest
from agentrl.inference.backend import Backend, InferenceError, PauseMode


class WeightPushError(RuntimeError):
    """The push failed and was rolled back; the message says where."""


@dataclass
class Committed:
    """What the servers hold.

    Attributes:
        version: Policy version.
        path: Folder it can be loaded from again.
    """

    version: int
    path: str


class WeightTransaction:
    """Owns what the servers serve.

    Args:
        backends: All servers.
        initial: What they were started with.
        mode: What happens to requests in flight.
        lease_seconds: Longest time a push may take.
    """

    def __init__(self, backends: list[Backend], initial: Committed, mode: PauseMode, lease_seconds: float) -> None:
        self._backends = backends
        self.committed = initial
        self._mode: PauseMode = mode
        self._lease = lease_seconds
        self._lock = asyncio.Lock()

    async def push(self, manifest: WeightManifest) -> None:
        """Make ``manifest`` the served version.

        Raises:
            WeightPushError: It could not be; the last committed version is served again.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(self._lease):
                    await self._each(lambda b: b.pause(self._mode))
                    await self._each(lambda b: b.load(manifest.path, manifest.version))
                    for backend in self._backends:
                        wrong = await backend.verify(manifest)
                        if wrong:
                            raise InferenceError(
                                f"{backend.url} holds other values for {len(wrong)} tensors: {wrong[:5]}"
                            )
            except (InferenceError, TimeoutError) as error:
                reason = str(error) or f"no end within weights.lease_seconds={self._lease:g}"
                await self._roll_back(reason)
                raise WeightPushError(f"version {manifest.version} was not taken: {reason}") from error
            self.committed = Committed(manifest.version, manifest.path)
            await self._each(lambda b: b.resume())

    async def _roll_back(self, reason: str) -> None:
        last = self.committed
        try:
            await self._each(lambda b: b.load(last.path, last.version))
            await self._each(lambda b: b.resume())
        except InferenceError as error:
            raise WeightPushError(f"{reason}; and going back to version {last.version} failed: {error}") from error

    async def _each(self, call: Callable[[Backend], Awaitable[None]]) -> None:
        await asyncio.gather(*(call(backend) for backend in self._backends))
