"""Adds and removes inference servers during a run.

Guarantees: a new server gets the current weights before it gets traffic, and is not paused afterwards, whoever paused
it; a removed one finishes its running requests. Servers that keep a version for an evaluation get the committed one
after it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from agentrl.inference.backend import Backend, InferenceError
from agentrl.inference.router import Router
from agentrl.weights.pauses import until_resumed
from agentrl.weights.transaction import WeightTransaction


class ServerPool:
    """The servers of one run, to be listed, added and removed.

    Args:
        router: Router that distributes requests to the servers.
        weights: Weight transaction of these servers.
        connect: Makes a backend for a URL.
        grace: Seconds to wait for the client that paused a server, before it is taken over.
    """

    def __init__(
        self,
        router: Router,
        weights: WeightTransaction,
        connect: Callable[[str], Backend],
        grace: float = 120.0,
    ) -> None:
        self._router = router
        self._weights = weights
        self._connect = connect
        self._grace = grace

    def status(self) -> list[dict[str, Any]]:
        """Lists all servers with their state; serving ones with their policy version."""
        version = self._weights.committed.version
        return [
            {**asdict(status), "version": version if status.state == "serving" else None}
            for status in self._router.status()
        ]

    async def add(self, url: str) -> None:
        """Load the current weights into a server and give it traffic.

        Raises:
            InferenceError: The server serves already, cannot be reached, or refuses the weights.
        """
        backend = self._connect(url)
        known = {status.url: status.state for status in self._router.status()}
        if known.get(backend.url) in ("serving", "reserved"):
            raise InferenceError(f"{backend.url} serves already")
        try:
            await until_resumed(backend, self._grace)
            await self._weights.join(backend)
        except InferenceError:
            await backend.close()
            raise

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """Context in which a quarter of the servers, at least one of two, keep their version, for an evaluation.

        They are left out of weight pushes and take no training requests; afterwards they get the committed version, as
        a server that is back does. The evaluation's end does not wait for that: after a broadcast it takes until the
        next version.
        """
        version = self._weights.committed.version
        kept = self._router.reserve()
        yield  # after a cancellation the run is ending: nobody needs the servers
        for backend in kept:
            if not await self._weights.still_committed(version):
                self._router.bring_back(backend, f"it kept version {version} for an evaluation")
            else:
                self._router.release_reserved(backend)

    def remove(self, url: str) -> None:
        """Stop sending new requests to a server.

        Raises:
            LookupError: The run has no server with this URL.
            ValueError: The server is the last one.
        """
        url = url.rstrip("/")
        if [backend.url for backend in self._router.backends] == [url]:
            raise ValueError(f"{url} is the last server: add another one first")
        self._router.remove(url)
