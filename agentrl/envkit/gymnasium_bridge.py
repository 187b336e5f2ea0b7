"""Wraps an async environment as a plain ``gymnasium.Env``.

Guarantees: it works with Gymnasium's checker and vector environments; the same seed gives the same episode; it can be
used from any thread and inside or outside of a running event loop, whose tasks it never runs. Observations and actions
are unchanged: lists of messages, and messages.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import gymnasium

from agentrl.core.environment import Environment
from agentrl.core.images import shown_text
from agentrl.envkit.make import make

T = TypeVar("T")
GRACE = 1.0  # seconds for the event loop to notice its own deadline
CALL_SECONDS = 600.0  # longest reset or step; a hanging environment must not hang its caller for ever


class GymnasiumBridge(gymnasium.Env[Any, Any]):
    """Runs an async environment on a separate event loop.

    Args:
        agentrl_env: Registered id or path of the environment, or the environment itself.
        render_mode: With ``ansi``, :meth:`render` returns the conversation as text.
        agentrl_timeout: Time limit of ``reset``, ``step`` and ``close``, in seconds.
        kwargs: Arguments of the environment.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as gymnasium declares it

    def __init__(
        self,
        agentrl_env: str | Environment[Any, Any],
        render_mode: str | None = None,
        agentrl_timeout: float = CALL_SECONDS,
        **kwargs: Any,
    ) -> None:
        self.render_mode = render_mode
        self._timeout = agentrl_timeout
        self.env = make(agentrl_env, **kwargs) if isinstance(agentrl_env, str) else agentrl_env
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space
        self._said: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; without ``options`` the environment draws one of its own tasks."""
        super().reset(seed=seed)
        own = int(self.np_random.integers(1 << 31)) if seed is None else seed
        observation, info = self._run(self.env.reset(seed=own, options=options))
        self._said = [observation]
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one action.

        Raises:
            ValueError: The reward is missing, which Gymnasium does not support.
        """
        observation, reward, terminated, truncated, info = self._run(self.env.step(action))
        if reward is None:
            raise ValueError(f"{type(self.env.unwrapped).__name__}.step has no reward for this action")
        self._said += [action, observation]
        return observation, float(reward), terminated, truncated, info

    def render(self) -> str | None:  # type: ignore[override]
        """Returns the conversation so far as text if ``render_mode`` is ``ansi``, else ``None``."""
        if self.render_mode != "ansi":
            return None
        messages = [one for said in self._said for one in (said if isinstance(said, list) else [said])]
        return "\n".join(_line(message) for message in messages)

    def close(self) -> None:
        """Close the environment; may be called more than once."""
        self._run(self.env.close())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        loop = _Loop.running()
        future = asyncio.run_coroutine_threadsafe(_bounded(work, self._timeout), loop)
        try:
            return future.result(self._timeout + GRACE)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # raised by the environment itself
            future.cancel()
            _Loop.give_up(loop)  # the loop is blocked: later calls get another
            name = type(self.env.unwrapped).__name__
            raise TimeoutError(f"{name} blocked its event loop for over {self._timeout:g} s") from None


async def _bounded(work: Coroutine[Any, Any, T], seconds: float) -> T:
    async with asyncio.timeout(seconds):
        return await work


def _line(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    calls = [call.get("function", {}) for call in message.get("tool_calls") or []]
    said = [shown_text(message.get("content")), *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]
    return f"[{message.get('role')}] " + " ".join(part for part in said if part)


class _Loop:
    """The event loop of all bridges of a process, in a daemon thread; created again after a fork."""

    _lock = threading.Lock()
    _owner: ClassVar[tuple[int, asyncio.AbstractEventLoop] | None] = None

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        """Returns the process's loop, or a new one if the caller runs in it: a bridge inside a bridge."""
        with cls._lock:
            if cls._owner is None or cls._owner[0] != os.getpid():
                cls._owner = (os.getpid(), cls._start())
            loop = cls._owner[1]
        return cls._start() if asyncio._get_running_loop() is loop else loop

    @classmethod
    def give_up(cls, loop: asyncio.AbstractEventLoop) -> None:
        """Stop using a blocked loop; it ends when it is no longer blocked."""
        loop.call_soon_threadsafe(loop.stop)
        with cls._lock:
            if cls._owner is not None and cls._owner[1] is loop:
                cls._owner = None

    @staticmethod
    def _start() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="agentrl-bridge", daemon=True).start()
        return loop


os.register_at_fork(after_in_child=lambda: setattr(_Loop, "_lock", threading.Lock()))
