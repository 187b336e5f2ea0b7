"""One ``gymnasium.Env`` that is used from threads and may be given up while it is in one.

Guarantees: its methods never run at the same time; it is made in the thread that first needs it; it is closed once,
after the call that it is in, however long that takes, and never by the event loop.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium

Env = gymnasium.Env[Any, Any]
T = TypeVar("T")


class HeldEnv:
    """A blocking environment and the lock around it.

    Args:
        make: Makes the environment.
    """

    def __init__(self, make: Callable[[], Env]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._env: Env | None = None
        self._given_up = False

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(env, ...)``; blocks."""
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
        """Close the environment, if it was made; blocks until the call that it is in returns."""
        with self._lock:
            env, self._env = self._env, None
            if env is not None:
                env.close()

    def give_up(self) -> None:
        """Close the environment as soon as it is free, without waiting for that."""
        self._given_up = True
        if not self._lock.locked():  # otherwise the call that holds it sees the flag when it is through
            threading.Thread(target=self.close, name="agentrl-close", daemon=True).start()
