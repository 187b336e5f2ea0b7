"""Asks the relays of machines of servers to bring a version near (:mod:`agentrl.launch.weight_relay`).

Guarantees: servers that share a relay share one copy; a server without one loads from the folder that all see. A relay
that fails is a failure of the push, which names it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from agentrl.inference.http import Access, ServerHttp


class Relays:
    """Relays of a run's servers.

    Args:
        folder: Folder with a file for each server on another machine: its URL, and that of its machine's relay.
        shared: Folder that all machines see; versions elsewhere are on each machine already.
        access: The run's key and trust.
        seconds: Longest time of a copy.
    """

    def __init__(self, folder: Path, shared: Path, access: Access, seconds: float) -> None:
        self._folder, self._shared, self._access, self._seconds = folder, shared, access, seconds

    async def near(self, server: str, path: str, version: int) -> str:
        """Returns the folder from which a server loads a version.

        Args:
            server: URL of the server.
            path: Folder of the version that all machines see.
            version: Policy version.

        Raises:
            InferenceError: The server's relay does not answer, or cannot copy the version.
        """
        relay = self._known().get(server)
        if relay is None or not Path(path).is_relative_to(self._shared):
            return path
        http = ServerHttp(relay, self._seconds, access=self._access)
        try:
            answer = await http.post("/bring", {"path": path, "version": version}, repeatable=True)
        finally:
            await http.close()
        return str(answer["path"])

    def _known(self) -> Mapping[str, str]:
        """Returns the relay of each server that has one; servers come and go."""
        found: dict[str, str] = {}
        for file in self._folder.glob("*.json"):
            try:
                said = json.loads(file.read_text())
            except (FileNotFoundError, ValueError):  # a shared disk may show a name before its contents
                continue
            if said.get("relay"):
                found[said["url"]] = said["relay"]
        return found
