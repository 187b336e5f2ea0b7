"""A weight push as a transaction over all servers: pause, load, verify, commit, resume.

Guarantees: either all servers hold the new version, verified, or all hold the last committed one; generation resumes in
both cases, also when this process ends in the middle (:mod:`agentrl.weights.pauses`). A push, its resume and its
roll-back end within ``weights.lease_seconds`` each, and the pauses are renewed until then: no server samples with a
version that was rolled back. Nothing is committed that a server did not confirm. A server that dies, restarts or stands
still meanwhile is taken out and does not stop the others; one that joins holds the committed version before it serves.
When the last one is taken out, the push waits for one to join, for ``inference.patience`` at most; it gets the new
version then.

A version that was broadcast stands in no file: after a failed broadcast the servers stay paused, and their pauses are
renewed, until the trainer offers the version again in a file, and a server that joins waits for a version in a file,
which it makes the trainer write (:meth:`WeightTransaction.members`). Nor does a server join after a trainer has learnt
who takes part in a broadcast and before its push: it would be asked to receive in a group that it is not in.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, TypeVar

from agentrl.core.weight_manifest import WeightManifest
from agentrl.inference.backend import Backend, InferenceError, PauseMode, ServerUnreachable
from agentrl.inference.router import Router
from agentrl.weights.first_push import changed, scores
from agentrl.weights.pauses import Pauses

T = TypeVar("T")


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


class _NoneLeft(InferenceError):
    """All servers of a push were taken out."""


class WeightTransaction:
    """Controls the version that the servers serve.

    Args:
        router: All servers.
        initial: Version that the servers were started with.
        mode: Treatment of requests in flight, see ``weights.pause_mode``.
        lease_seconds: Longest time a push may take.
        pauses: Pauses the servers.
        near: Function of a server's URL, a folder and a version that returns the folder from which the server loads the
            version; by default the same folder.
        probe: Ids of a text whose logprobs a push of the committed version must leave as they are; none: not checked.
    """

    def __init__(
        self,
        router: Router,
        initial: Committed,
        mode: PauseMode,
        lease_seconds: float,
        pauses: Pauses | None = None,
        near: Callable[[str, str, int], Awaitable[str]] | None = None,
        probe: Sequence[int] = (),
    ) -> None:
        self._router = router
        self.committed = initial
        self._manifest: WeightManifest | None = None
        self._mode: PauseMode = mode
        self._lease = lease_seconds
        self._near = near or _same
        self._pauses = pauses or Pauses(longest=lease_seconds)
        self._probe = tuple(probe)
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
            ranks = await asyncio.gather(*(self._router.ask(backend, lambda one: one.ranks()) for backend in servers))
            urls = [backend.url for backend in servers]
            by_file = self._joining > 0
            if not by_file:
                self._filed.clear()
            return {"ranks": dict(zip(urls, ranks, strict=True)), "by_file": by_file}

    async def push(self, manifest: WeightManifest) -> dict[str, float]:
        """Make ``manifest`` the served version.

        Returns:
            ``weights/paused_s``: mean over the servers of the seconds from the answer to the call that paused one to
            the answer to the call that resumed it; absent if none was paused, because all joined with the version.

        Raises:
            WeightPushError: The push failed; the last committed version is served again.
        """
        async with self._lock:
            try:
                if self._probe and manifest.version == self.committed.version:
                    return await self._push_unchanged(self._router.backends, manifest)
                return await self._swap(self._router.backends, manifest)
            except _NoneLeft as error:
                if not manifest.path:
                    self._set_filed()
                    raise WeightPushError(f"version {manifest.version} was not taken: {error}") from error
                self._commit(manifest)  # no server holds another version
        try:
            await self._router.pick()
        except InferenceError as error:
            raise WeightPushError(f"version {manifest.version} was not taken: {error}") from error
        return {}

    async def _push_unchanged(self, servers: list[Backend], manifest: WeightManifest) -> dict[str, float]:
        """Push the weights that the servers have, and compare what they compute.

        Raises:
            WeightPushError: As :meth:`push`, or a server computes something else; it keeps these weights.
            _NoneLeft: No server is left.
        """
        before = await scores(self._router, servers, self._probe)
        found = await self._swap(servers, manifest)
        if wrong := changed(before, await scores(self._router, servers, self._probe)):
            raise WeightPushError(
                f"the first push, of unchanged weights, changed the logprobs of {wrong}: the server reads them in "
                "another way than its own files; use inference.engine=embedded for this model"
            )
        return found

    def _commit(self, manifest: WeightManifest) -> None:
        self.committed, self._manifest = Committed(manifest.version, manifest.path or None), manifest
        self._set_filed()

    def _set_filed(self) -> None:
        """Let servers join if the committed version stands in a file."""
        if self.committed.path is not None:
            self._filed.set()
        else:
            self._filed.clear()

    async def _swap(self, servers: list[Backend], manifest: WeightManifest) -> dict[str, float]:
        """Push to ``servers``, of which those that die leave the list.

        Raises:
            WeightPushError: As :meth:`push`.
            _NoneLeft: No server is left.
        """
        paths = await self._brought(servers, manifest)
        try:
            async with asyncio.timeout(self._lease):
                await self._each(servers, lambda b: self._pauses.pause(b, self._mode))
                await self._each(servers, lambda b: _load(b, manifest, paths.get(b.url, "")))
                await self._each(servers, lambda b: _verify(b, manifest))
                self._check_pauses(servers, manifest)
            self._commit(manifest)
        except _NoneLeft:
            raise
        except (InferenceError, TimeoutError) as error:
            reason = str(error) or f"no end within weights.lease_seconds={self._lease:g}"
            try:
                await self._roll_back(servers, reason)
            finally:
                self._set_filed()
            raise WeightPushError(f"version {manifest.version} was not taken: {reason}") from error
        seconds = [one for one in await self._resume(servers) if one is not None]
        return {"weights/paused_s": fmean(seconds)} if seconds else {}

    async def _brought(self, servers: list[Backend], manifest: WeightManifest) -> dict[str, str]:
        """Brings a version near each server while it still samples; returns the folders by URL, none of a broadcast.

        Raises:
            WeightPushError: It cannot be brought; the servers go on with the version that they have.
            _NoneLeft: No server is left.
        """
        if manifest.broadcast is not None:
            return {}
        try:
            async with asyncio.timeout(self._lease):
                paths = await self._each(servers, lambda b: self._near(b.url, manifest.path, manifest.version))
        except _NoneLeft:
            raise
        except (InferenceError, TimeoutError) as error:
            self._set_filed()
            reason = str(error) or f"no copy within weights.lease_seconds={self._lease:g}"
            raise WeightPushError(f"version {manifest.version} was not taken: {reason}") from error
        return dict(zip((server.url for server in servers), paths, strict=True))

    def _check_pauses(self, servers: list[Backend], manifest: WeightManifest) -> None:
        """Refuse a broadcast whose server went on in the middle: it sampled with a mixture of two versions.

        A file is loaded in one piece between two model steps, so there a lost pause does no harm.
        """
        lost = sorted(self._pauses.lost.intersection(server.url for server in servers))
        if lost and manifest.broadcast is not None:
            raise InferenceError(f"the pause of {', '.join(lost)} ended before the broadcast did")

    async def _resume(self, servers: list[Backend]) -> list[float | None]:
        """Resume ``servers``; returns how long each was paused."""
        try:
            async with asyncio.timeout(self._lease):
                return await self._each(servers, self._pauses.resume)
        except TimeoutError as error:
            raise InferenceError(f"a server does not resume within weights.lease_seconds={self._lease:g}") from error

    async def join(self, backend: Backend) -> None:
        """Bring a server to the committed version, then give it traffic.

        Raises:
            InferenceError: The server does not load the weights; it is not left paused.
        """
        await backend.version()  # one that does not answer has nothing to wait for
        await self._lock.acquire()
        try:
            while (path := self._file()) is None:
                await self._until_filed()
            try:
                async with asyncio.timeout(self._lease):
                    await self._take_over(backend, path)
            except TimeoutError as error:
                raise InferenceError(
                    f"{backend.url} does not take the weights within weights.lease_seconds={self._lease:g}"
                ) from error
            self._router.admit(backend)
        finally:
            self._lock.release()

    async def still_committed(self, version: int) -> bool:
        """Whether ``version`` is the committed one, once no push goes on."""
        async with self._lock:
            return self.committed.version == version

    async def _take_over(self, backend: Backend, path: str) -> None:
        """Load the committed version from ``path`` and verify it, in a pause."""
        try:
            path = await self._near(backend.url, path, self.committed.version)
            await self._pauses.pause(backend, "abort")
            await backend.load(path, self.committed.version)
            if self._manifest is not None:
                await _verify(backend, self._manifest)
        except BaseException:  # a cancellation too: nobody else would resume it
            with contextlib.suppress(InferenceError):
                await self._pauses.resume(backend)
            raise
        await self._pauses.resume(backend)

    async def close(self) -> None:
        """Resume the servers that a push left paused; call it when no push can come any more."""
        await self._pauses.close()

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
            self._pauses.prolong(inf)  # the servers may hold a mixture; a trainer that does not come back ends the run
            raise WeightPushError(
                f"{reason}; version {last.version} was broadcast and cannot be loaded again: the servers stay paused"
            )
        try:
            async with asyncio.timeout(self._lease):
                self._pauses.prolong(self._lease)
                await self._each(servers, lambda b: self._pauses.pause_again(b, self._mode))
                await self._each(servers, lambda b: self._load_again(b, str(last.path), last.version))
            await self._resume(servers)
        except (InferenceError, TimeoutError) as error:
            why = str(error) or f"no end within weights.lease_seconds={self._lease:g}"
            raise WeightPushError(f"{reason}; and going back to version {last.version} failed: {why}") from error

    async def _load_again(self, backend: Backend, path: str, version: int) -> None:
        await backend.load(await self._near(backend.url, path, version), version)

    async def _each(self, servers: list[Backend], call: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """Call all of ``servers`` and return their answers; those that do not answer leave the list and the router.

        A server that broke the call off and lives was restarted: its weights are those that it was started with. It
        comes back as one that died does, by the router's next probe.

        Raises:
            InferenceError: A server that lives refused, or did not answer in time.
            _NoneLeft: No server is left.
        """
        asked = (self._router.ask(backend, call) for backend in servers)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        answers: list[T] = []
        for backend, outcome in zip(list(servers), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                answers.append(outcome)
                continue
            late = isinstance(outcome, ServerUnreachable) and outcome.timed_out
            if not isinstance(outcome, ServerUnreachable) or (late and await backend.alive()):
                raise outcome
            self._router.take_out(backend, str(outcome))
            servers.remove(backend)
        if not servers:
            states = "; ".join(f"{s.url}: {s.error or s.state}" for s in self._router.status())
            raise _NoneLeft(f"no inference server is left: {states}")
        return answers


async def _same(server: str, path: str, version: int) -> str:
    return path


async def _load(backend: Backend, manifest: WeightManifest, path: str) -> None:
    if manifest.broadcast is not None:
        await backend.receive(manifest, manifest.broadcast)
    else:
        await backend.load(path, manifest.version)


async def _verify(backend: Backend, manifest: WeightManifest) -> None:
    wrong = await backend.verify(manifest)
    if wrong:
        every = len(wrong) >= len(manifest.fingerprints or manifest.samples)
        hint = "; all of them differ: does it compute in another type than inference.dtype?" if every else ""
        raise InferenceError(f"{backend.url} holds other values for {len(wrong)} tensors: {wrong[:5]}{hint}")
