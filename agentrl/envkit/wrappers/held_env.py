"""Holds a ``gymnasium.Env`` that is used from threads, and that can be abandoned during a call.

Guarantees: the environment's methods never run concurrently; it is made in the thread that first needs it; it is
closed once, after a running call, however long that takes, and never by the event loop.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium

Env = gymnasium.Env[Any, Any]
T = TypeVar("T")


class HeldEnv:
    """A blocking environment with a lock.

    Args:
        make: Makes the environment.
    """

    def __init__(self, make: Callable[[], Env]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._env: Env | None = None
        self._given_up = False

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(env, ...)`` in this thread."""
        try:
            with self._lock:
                if self._given_up:
                    raise RuntimeError("the environment was given up before this call began")
                if self._env is None:
                    self._env = self._make()
                return function(self._env, *args)
        finally:
            if self._given_up:
                self.close()

    def close(self) -> None:
        """Close the environment, if it was made; blocks until a running call returns."""
        with self._lock:
            env, self._env = self._env, None
            if env is not None:
                env.close()

    def give_up(self) -> None:
        """Close the environment after a running call, without waiting for it."""
        self._given_up = True
        if not self._lock.locked():  # otherwise the running call closes it at its end
            threading.Thread(target=self.close, name="agentrl-close", daemon=True).start()
