"""Keeps a worker process's router at what the controller knows of the inference servers.

Guarantees: the controller alone decides which servers serve; a worker's router has them as they were last told. A
server that a request finds dead is not used by this worker any more and is reported, and comes back when the controller
has given it the current weights. Workers begin with different servers, so that few episodes are spread as well as many.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.inference.backend import Backend
from agentrl.inference.router import Router


def servers_as_json(router: Router) -> list[dict[str, Any]]:
    """Returns what workers have to know of the servers."""
    return [
        {"url": one.url, "number": one.number, "state": one.state, "error": one.error}
        for one in router.status()
    ]  # fmt: skip


class FollowedServers:
    """The servers of a worker.

    Args:
        router: The worker's router, without servers.
        connect: Makes a backend for a URL.
        first: Index of the server to begin with.
        report: Called with URL, number and reason when a request has found a server dead.
    """

    def __init__(
        self, router: Router, connect: Callable[[str], Backend], first: int, report: Callable[[str, int, str], None]
    ) -> None:
        self._router = router
        self._connect = connect
        self._first = first
        self._report = report
        self._admitted: dict[str, tuple[int, Backend]] = {}  # URL -> number that the controller gave it, connection
        self._following = False
        router.changed = self._changed

    def follow(self, servers: Sequence[dict[str, Any]]) -> None:
        """Bring the router to what the controller says of all servers."""
        self._following = True
        turn = self._first % len(servers) if servers else 0
        for one in [*servers[turn:], *servers[:turn]]:
            self._follow(one["url"], one["number"], one["state"], one["error"])
        self._following = False

    def _follow(self, url: str, number: int, state: str, error: str) -> None:
        known = self._admitted.get(url)
        if known is not None and (known[0] != number or state == "gone"):
            self._router.take_out(known[1], error or "it was admitted anew")
        if state in ("serving", "reserved") and (known is None or known[0] != number):
            known = self._admitted[url] = number, self._connect(url)
            self._router.admit(known[1])
        if known is None:
            return
        if state == "leaving":
            self._router.remove(url)
        elif state == "reserved":
            self._router.keep(known[1])
        elif state == "serving":
            self._router.release_reserved(known[1])

    def _changed(self) -> None:
        """Reports the servers that a request has found dead."""
        if self._following:
            return
        for one in self._router.status():
            if one.state == "gone" and one.url in self._admitted:
                self._report(one.url, self._admitted[one.url][0], one.error)
