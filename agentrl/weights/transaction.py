"""A weight push as a transaction over all servers: pause, load, verify, commit, resume.

Guarantees: either all servers hold the new version, verified, or all hold the last committed one; generation resumes
in both cases; the whole thing ends within the lease. Nothing is committed that a server did not confirm. A server that
dies meanwhile is taken out and does not stop the others; one that joins holds the committed version before it serves.

A version that was broadcast stands in no file: after a failed broadcast the servers stay paused until the trainer
offers the version again in a file, and a server that joins waits for a version in a file, which it makes the trainer
write (:meth:`WeightTransaction.members`). Nor does a server join after a trainer has learnt who takes part in a
broadcast and before its push: it would be asked to receive in a group that it is not in.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl.core.weight_manifest import WeightManifest
from agentrl.inference.backend import Backend, InferenceError, PauseMode, ServerUnreachable
from agentrl.inference.router import Router


class WeightPushError(RuntimeError):
    """The push failed and was rolled back; the message says where."""


@dataclass
class Committed:
    """The version that the servers hold.

    Attributes:
        version: Policy version.
        path: Folder it can be loaded from again; ``None`` when it was broadcast.
    """

    version: int
    path: str | None


class WeightTransaction:
    """Controls the version that the servers serve.

    Args:
        router: All servers.
        initial: Version that the servers were started with.
        mode: Treatment of requests in flight, see ``weights.pause_mode``.
        lease_seconds: Longest time a push may take.
    """

    def __init__(self, router: Router, initial: Committed, mode: PauseMode, lease_seconds: float) -> None:
        self._router = router
        self.committed = initial
        self._manifest: WeightManifest | None = None
        self._mode: PauseMode = mode
        self._lease = lease_seconds
        self._lock = asyncio.Lock()
        self._joining = 0  # servers that wait for a file
        self._filed = asyncio.Event()  # set while the committed version stands in a file and no broadcast is due
        self._filed.set()

    async def members(self) -> dict[str, Any]:
        """Servers and ranks that take part in a broadcast; servers that come later wait for its push.

        Returns:
            ``ranks``: URL of a server -> its ranks; ``by_file``: whether the next version must stand in a file.

        Raises:
            InferenceError: A server does not tell its number of ranks.
        """
        async with self._lock:
            servers = self._router.backends
            ranks = await asyncio.gather(*(backend.ranks() for backend in servers))
            urls = [backend.url for backend in servers]
            by_file = self._joining > 0
            if not by_file:
                self._filed.clear()
            return {"ranks": dict(zip(urls, ranks, strict=True)), "by_file": by_file}

    async def push(self, manifest: WeightManifest) -> None:
        """Make ``manifest`` the served version.

        Raises:
            WeightPushError: The push failed; the last committed version is served again.
        """
        async with self._lock:
            servers = self._router.backends
            try:
                async with asyncio.timeout(self._lease):
                    await self._each(servers, lambda b: b.pause(self._mode))
                    await self._each(servers, lambda b: _load(b, manifest))
                    await self._each(servers, lambda b: _verify(b, manifest))
                self.committed, self._manifest = Committed(manifest.version, manifest.path or None), manifest
            except (InferenceError, TimeoutError) as error:
                reason = str(error) or f"no end within weights.lease_seconds={self._lease:g}"
                await self._roll_back(servers, reason)
                raise WeightPushError(f"version {manifest.version} was not taken: {reason}") from error
            finally:
                (self._filed.set if self.committed.path else self._filed.clear)()
            await self._each(servers, lambda b: b.resume())

    async def join(self, backend: Backend) -> None:
        """Bring a server to the committed version, then give it traffic.

        Raises:
            InferenceError: The server does not load the weights.
        """
        await backend.version()  # one that does not answer has nothing to wait for
        await self._lock.acquire()
        try:
            while (path := self._file()) is None:
                await self._until_filed()
            await backend.pause("abort")
            await backend.load(path, self.committed.version)
            if self._manifest is not None:
                await _verify(backend, self._manifest)
            await backend.resume()
            self._router.admit(backend)
        finally:
            self._lock.release()

    def _file(self) -> str | None:
        """Folder from which a server that joins can load the committed version now; None where there is none."""
        return self.committed.path if self._filed.is_set() else None

    async def _until_filed(self) -> None:
        """Give the lock away until a push leaves a file."""
        self._lock.release()
        self._joining += 1
        try:
            await self._filed.wait()
        finally:
            self._joining -= 1
            await self._lock.acquire()

    async def _roll_back(self, servers: list[Backend], reason: str) -> None:
        last = self.committed
        if last.path is None:
            raise WeightPushError(
                f"{reason}; version {last.version} was broadcast and cannot be loaded again: the servers stay paused"
            )
        try:
            await self._each(servers, lambda b: b.load(str(last.path), last.version))
            await self._each(servers, lambda b: b.resume())
        except InferenceError as error:
            raise WeightPushError(f"{reason}; and going back to version {last.version} failed: {error}") from error

    async def _each(self, servers: list[Backend], call: Callable[[Backend], Awaitable[None]]) -> None:
        """Call all of ``servers``; those that turn out dead leave the list and the router.

        Raises:
            InferenceError: A server that lives refused, or none is left.
        """
        outcomes = await asyncio.gather(*(call(backend) for backend in servers), return_exceptions=True)
        for backend, outcome in zip(list(servers), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                continue
            if not isinstance(outcome, ServerUnreachable) or await backend.alive():
                raise outcome
            self._router.take_out(backend, str(outcome))
            servers.remove(backend)
        if not servers:
            states = "; ".join(f"{s.url}: {s.error or s.state}" for s in self._router.status())
            raise InferenceError(f"no inference server is left: {states}")


async def _load(backend: Backend, manifest: WeightManifest) -> None:
    if manifest.broadcast is not None:
        await backend.receive(manifest, manifest.broadcast)
    else:
        await backend.load(manifest.path, manifest.version)


async def _verify(backend: Backend, manifest: WeightManifest) -> None:
    wrong = await backend.verify(manifest)
    if wrong:
        every = len(wrong) >= len(manifest.fingerprints or manifest.samples)
        hint = "; all of them differ: does it compute in another type than inference.dtype?" if every else ""
        raise InferenceError(f"{backend.url} holds other values for {len(wrong)} tensors: {wrong[:5]}{hint}")
