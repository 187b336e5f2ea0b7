"""A worker's HTTP connection to its controller.

Guarantees: every call carries the run's secret; a connection that cannot be made, or breaks, is told apart from a
refusal; signs of life come from a thread of their own, so that an episode that blocks the event loop is not taken for a
dead worker (:mod:`agentrl.launch.loop_watch` looks after that).
"""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import httpx

from agentrl.inference.http import Access
from agentrl.rollout.worker_loop import ControllerGone, WorkerRefused
from agentrl.rollout.worker_processes import BEAT_SECONDS
from agentrl.rollout.worker_wire import Ended, ended_to_bytes, to_json

LEAVE_SECONDS = 2.0
CALL_SECONDS = 60.0  # for an answer, beyond what the call waits on purpose


class HttpLink:
    """Calls of one worker to the controller at ``url``; use it as an async context manager.

    Args:
        url: Base URL of the controller.
        secret: The run's secret.
        name: Name of the worker, unique in the run.
        pid: Process id of the worker.
        ca: File of the authority that the controller's certificate is signed by; ``None`` for those of the system.
    """

    def __init__(self, url: str, secret: str, name: str, pid: int, ca: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers, self._trust = Access(secret).headers, Access(ca=ca).trust
        self._name, self._pid = name, pid
        self._number = 0
        self._session: aiohttp.ClientSession | None = None
        self._stopped = threading.Event()

    async def __aenter__(self) -> "HttpLink":
        self._session = aiohttp.ClientSession(
            headers=self._headers, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped.set()
        if self._session is not None:
            await self._session.close()

    async def join(self) -> None:
        """Take part in the run from now on; the other calls come after this one."""
        answer = await self._call("/workers/join", to_json({"name": self._name, "pid": self._pid}))
        self._number = answer["worker"]

    def beat(self, abandoned: Callable[[], int]) -> None:
        """Give signs of life until the end, with the number of abandoned episodes."""

        def forever() -> None:
            with httpx.Client(
                headers=self._headers, timeout=BEAT_SECONDS, trust_env=False, verify=self._trust
            ) as client:
                while not self._stopped.wait(BEAT_SECONDS):
                    body = {"worker": self._number, "abandoned": abandoned()}
                    try:
                        client.post(f"{self._url}/workers/beat", json=body)
                    except httpx.HTTPError:
                        continue  # the loop's own calls find out whether the controller is there

        threading.Thread(target=forever, name="agentrl-worker-beat", daemon=True).start()

    async def poll(self, seen: int, servers_seen: int, seconds: float) -> dict[str, Any]:
        """Waits for orders, see :meth:`WorkerProcesses.poll`."""
        body = {"worker": self._number, "seen": seen, "servers_seen": servers_seen, "seconds": seconds}
        return await self._call("/workers/poll", to_json(body), seconds)

    async def ended(self, ended: list[Ended], abandoned: int) -> None:
        """Sends ended orders."""
        await self._call("/workers/ended", ended_to_bytes(ended, worker=self._number, abandoned=abandoned))

    async def ages(self, ages: Mapping[int, int]) -> None:
        """Tells the versions of the oldest tokens of running episodes, by order."""
        await self._call("/workers/ages", to_json({"worker": self._number, "ages": list(ages.items())}))

    async def report(self, url: str, number: int, reason: str) -> None:
        """Says that an inference server is dead."""
        body = {"worker": self._number, "url": url, "number": number, "reason": reason}
        await self._call("/workers/report", to_json(body))

    async def leave(self) -> None:
        """Says that this worker ends; it does not wait long for the answer."""
        await self._call("/workers/leave", to_json({"worker": self._number}), LEAVE_SECONDS - CALL_SECONDS)

    async def _call(self, path: str, data: bytes, waits: float = 0.0) -> dict[str, Any]:
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=waits + CALL_SECONDS)
        try:
            async with self._session.post(self._url + path, data=data, timeout=limit, ssl=self._trust) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            said = str(error) or type(error).__name__
            raise ControllerGone(f"the controller at {self._url} does not answer: {said}") from error
        if response.status == 503:  # it is stopping
            raise ControllerGone(f"the controller at {self._url} is stopping")
        if response.status != 200:
            text = answer[:2000].decode(errors="replace")
            raise WorkerRefused(f"the controller answered {path} with {response.status}: {text}")
        return json.loads(answer)
