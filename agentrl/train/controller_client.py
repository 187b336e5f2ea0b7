"""The trainer's side of the calls to the rollout controller.

Guarantees: only rank 0 calls; each call has a timeout, and no timeout limits the length of an evaluation; a controller
that cannot be reached or refuses raises :class:`ControllerError` with the controller's message. Heartbeats run in their
own thread and stop with the trainer.
"""

import os
import threading
from typing import Any

import httpx

from agentrl.core.weight_manifest import WeightManifest

HEARTBEAT_SECONDS = 5.0
READY_SECONDS = 5.0  # longest wait within one call for the end of an evaluation
ANSWER_SECONDS = 60.0  # extra time for the answer to such a call
SECRET_ENV = "AGENTRL_SECRET"  # set by the launcher for its children; travels as a bearer token


class ControllerError(RuntimeError):
    """The controller refused a call or could not be reached."""


class ControllerClient:
    """Calls the controller at ``url`` with JSON over HTTP.

    Args:
        url: Base URL of the controller.
        timeout: Timeout of a call in seconds; the longest call waits for a batch.
    """

    def __init__(self, url: str, timeout: float) -> None:
        secret = os.environ.get(SECRET_ENV, "")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._stop = threading.Event()
        self._step = 0
        self._thread: threading.Thread | None = None

    def next_batch(self, step: int) -> bytes:
        """Waits for the batch of trainer step ``step`` and returns its columns as bytes."""
        self._step = step
        return self._post("/next_batch", {"step": step}).content

    def ready(self, version: int | None = None, *, final: bool = False) -> bool:
        """Returns whether a version may be published, after a few seconds at most; ask again if not.

        Without a version it returns whether no evaluation is running.
        """
        body = {"seconds": READY_SECONDS, "version": version, "final": final}
        answer = self._post("/ready", body, timeout=READY_SECONDS + ANSWER_SECONDS)
        return answer.json()["ready"]

    def publish(self, version: int, manifest: WeightManifest, *, final: bool) -> dict[str, Any]:
        """Publishes a policy version and returns when the servers serve it; the final version ends the rollouts."""
        body = {"version": version, "manifest": manifest.model_dump(), "final": final}
        return self._post("/publish", body).json()

    def record(self, step: int, metrics: dict[str, float], *, final: bool) -> None:
        """Has the controller record the step's metrics, and evaluate its version if an evaluation is due."""
        self._post("/record", {"step": step, "metrics": metrics, "final": final})

    def members(self) -> dict[str, Any]:
        """Returns the servers of a broadcast with their ranks, and whether the next version must go by file instead."""
        return self._post("/members", {}).json()

    def checkpoint(self, step: int) -> bytes:
        """Returns the rollouts' part of the checkpoint after ``step``, to be saved with the parameters."""
        return self._post("/checkpoint", {"step": step}).content

    def start_heartbeat(self) -> None:
        """Starts a thread that tells the controller every few seconds that this process is alive."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Tells the controller that the trainer is done, and closes the connection."""
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
                continue  # the controller notices missing heartbeats; the main thread's next call raises

    def _post(self, path: str, body: dict[str, Any], timeout: float | None = None) -> httpx.Response:
        try:
            response = self._http.post(path, json=body, timeout=timeout or self._http.timeout)
        except httpx.ReadTimeout as error:
            seconds = timeout or self._http.timeout.read
            raise ControllerError(
                f"no answer from the controller to {path} within {seconds:g} s"
                f"{' (trainer.batch_timeout)' if timeout is None else ''}"
            ) from error
        except httpx.HTTPError as error:
            raise ControllerError(
                f"cannot reach the controller at {self._http.base_url}{path}: {error or type(error).__name__}"
            ) from error
        if response.status_code != 200:
            raise ControllerError(f"controller {path} answered {response.status_code}: {response.text[:2000]}")
        return response
