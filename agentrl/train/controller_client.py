"""The trainer's side of the calls to the rollout controller.

Guarantees: rank 0 alone talks; each call has a deadline, and none of them bounds an evaluation; a controller that is
gone or refuses is one exception that says so with the controller's own words. Heartbeats run in a thread of their own
and stop with the trainer.
"""

import os
import threading
from typing import Any

import httpx

from agentrl.core.weight_manifest import WeightManifest

HEARTBEAT_SECONDS = 5.0
READY_SECONDS = 5.0  # longest wait within one call for the end of an evaluation
ANSWER_SECONDS = 60.0  # longest wait for the answer to such a call, beyond that
SECRET_ENV = "AGENTRL_SECRET"  # set by the launcher for its children; travels as a bearer token


class ControllerError(RuntimeError):
    """The controller refused a call or could not be reached."""


class ControllerClient:
    """Talks JSON over HTTP to the controller at ``url``.

    Args:
        url: Base URL.
        timeout: Seconds the longest call (a batch) may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        secret = os.environ.get(SECRET_ENV, "")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._stop = threading.Event()
        self._step = 0
        self._thread: threading.Thread | None = None

    def next_batch(self, step: int) -> bytes:
        """Batch of trainer step ``step`` as the bytes of its columns; waits until it is there."""
        self._step = step
        return self._post("/next_batch", {"step": step}).content

    def ready(self) -> bool:
        """Whether a version may be published; waits a few seconds for an evaluation to end: ask again after a no."""
        answer = self._post("/ready", {"seconds": READY_SECONDS}, timeout=READY_SECONDS + ANSWER_SECONDS)
        return answer.json()["ready"]

    def publish(self, version: int, manifest: WeightManifest, *, final: bool) -> dict[str, Any]:
        """Offer a policy version; returns when the servers have committed to it. The final one ends the rollouts."""
        body = {"version": version, "manifest": manifest.model_dump(), "final": final}
        return self._post("/publish", body).json()

    def record(self, step: int, metrics: dict[str, float], *, final: bool) -> None:
        """Have the step's metrics written down, and its version evaluated where that is due."""
        self._post("/record", {"step": step, "metrics": metrics, "final": final})

    def members(self) -> dict[str, Any]:
        """Servers that a broadcast has to reach, with their ranks, and whether the version must go by file instead."""
        return self._post("/members", {}).json()

    def checkpoint(self, step: int) -> dict[str, Any]:
        """The controller's state at the cut after ``step``, to be stored with the parameters."""
        return self._post("/checkpoint", {"step": step}).json()

    def start_heartbeat(self) -> None:
        """Tell the controller every few seconds that this process lives."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Say that the trainer is done, and stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._post("/heartbeat", {"step": self._step, "done": True})
        self._http.close()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._http.post("/heartbeat", json={"step": self._step, "done": False}, timeout=HEARTBEAT_SECONDS)
            except httpx.HTTPError:
                continue  # the controller notices missing beats; a broken call shows in the main thread

    def _post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> httpx.Response:
        try:
            response = self._http.post(path, json=body, timeout=timeout or self._http.timeout)
        except httpx.HTTPError as error:
            raise ControllerError(f"controller {self._http.base_url}{path}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise ControllerError(f"controller {path} answered {response.status_code}: {response.text[:2000]}")
        return response
