"""Says what each process of a running run waits for, and until when, for ``agentrl runs show``.

Guarantees: nothing is measured or asked for it: the trainer waits in its calls to the controller alone, which are noted
when they begin and end; what has no limit says so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.rollout.controller import Controller

_BETWEEN = {  # latest call that ended -> what the trainer does until the next one
    "next_batch": "computes the update",
    "ready": "gathers the new weights",
    "members": "sends the new weights",
    "publish": "goes on after the push",
    "record": "goes on after the step",
    "checkpoint": "writes a checkpoint",
}
Wait = dict[str, Any]


class TrainerCalls:
    """Notes the trainer's calls to the controller.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside: dict[str, float] = {}  # call in progress -> time of its beginning
        self._latest: tuple[str, float] | None = None  # call that ended last, and when

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note that a call is in progress."""
        if name not in _BETWEEN:  # heartbeats, and calls of the command line
            yield
            return
        self._inside[name] = self._clock()
        try:
            yield
        finally:
            self._inside.pop(name, None)
            self._latest = name, self._clock()

    def wait(self, controller: Controller) -> Wait:
        """Describes what the trainer does."""
        recipe, now = controller.recipe, self._clock()
        if self._inside:
            name, began = next(iter(self._inside.items()))
            what, limit = _call(name, controller)
            return _wait("trainer", what, now - began, None if limit is None else limit - (now - began))
        silent = recipe.launch.heartbeat_timeout - (time.monotonic() - controller.last_beat)
        if self._latest is None:
            return _wait("trainer", "loads the model", None, silent)
        return _wait("trainer", _BETWEEN[self._latest[0]], now - self._latest[1], silent)


def run_status(controller: Controller, servers: Sequence[dict[str, Any]], calls: TrainerCalls) -> dict[str, Any]:
    """Returns the state of a run, as plain data.

    Args:
        controller: The run's controller.
        servers: Result of :meth:`~agentrl.rollout.server_pool.ServerPool.status`.
        calls: The trainer's calls.
    """
    state = controller.status()
    waits = [_controller(state, controller.recipe), calls.wait(controller)]
    waits += [_wait(server["url"], _server(server), None, None) for server in servers]
    limit = controller.recipe.rollout.episode_timeout
    for name, episodes in controller.rollouts.episodes.in_flight.items():
        waits.append(_wait(name, f"runs {episodes} episodes", None, limit if episodes else None, each=True))
    return {**state, "waits": waits, "servers": list(servers)}


def _call(name: str, controller: Controller) -> tuple[str, float | None]:
    """Says what a call waits for, and its limit in seconds."""
    state, recipe = controller.status(), controller.recipe
    if name == "next_batch":
        finished = f"{state['finished']} of {recipe.rollout.batch_size} groups are finished"
        return f"waits for the batch of step {state['step']}: {finished}", recipe.trainer.batch_timeout
    if name == "ready":
        return f"waits for the end of the evaluation of version {state['evaluating']}", None
    if name == "publish":
        return "waits until the servers have loaded the new version", recipe.weights.lease_seconds
    return f"waits for the controller ({name})", recipe.trainer.batch_timeout


def _controller(state: dict[str, Any], recipe: Recipe) -> Wait:
    doing = []
    if state["running"]:
        doing.append(f"runs {state['running']} groups, the oldest of draw {state['oldest']}")
    if state["evaluating"] is not None:
        doing.append(f"evaluates version {state['evaluating']}")
    if not doing:
        doing.append(state["idle"])
    limit = recipe.rollout.episode_timeout if state["running"] else None
    return _wait("controller", " and ".join(doing), None, limit, each=True)


def _server(server: dict[str, Any]) -> str:
    error = f": {server['error']}" if server["error"] else ""
    sessions = "" if server["sessions"] is None else f", {server['sessions']} sessions"
    return f"{server['state']}{sessions}{error}"


def _wait(process: str, what: str, seconds: float | None, left: float | None, *, each: bool = False) -> Wait:
    """Describes a wait.

    Args:
        process: Name of the process.
        what: What it does or waits for.
        seconds: How long it has done so.
        left: Seconds until it gives up; ``None`` if nothing limits it.
        each: Whether ``left`` is the limit of each episode, and not what is left of one.
    """
    limit = "limit_of_each" if each else "seconds_left"
    return {"process": process, "doing": what, "seconds": seconds, limit: left}
