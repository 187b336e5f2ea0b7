"""Says which inference servers stopped answering, and which came back, in one line each.

Guarantees: each change is said once; what the run does about it stands beside it; nothing is said of servers that
only changed their sessions, were added, or were removed by a user.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class ServerNews:
    """The states of a run's servers as they were last said.

    Args:
        patience: Seconds that a request waits while there is no server (``inference.patience``).
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._gone: set[str] = set()

    def told(self, servers: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns what a user should know.

        Args:
            servers: URL, ``state`` and ``error`` of each server, see
                :class:`~agentrl.inference.router.ServerStatus`.
        """
        left = sum(one["state"] in ("serving", "reserved") for one in servers)
        found = []
        for one in servers:
            url, gone = one["url"], one["state"] == "gone"
            if gone and url not in self._gone:
                found.append(f"server {url} is taken out: {one['error']}; {self._without(left)}")
            elif url in self._gone and one["state"] == "serving":
                found.append(f"server {url} is back, with the current weights")
            if gone:
                self._gone.add(url)
            else:
                self._gone.discard(url)
        return found

    def _without(self, left: int) -> str:
        if left:
            return f"the run continues with {left} other{'s' * (left > 1)}"
        return f"no other is left: requests wait {self._patience:g} s for one (inference.patience), then episodes fail"
