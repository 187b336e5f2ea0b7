"""Limits the turns and the seconds of an episode.

Guarantees: the step that reaches the limit is still taken and its reward counts; the episode is truncated after it,
and the inner environment judges it as it stands, unless it ended with that step anyway. A running step is never
interrupted.
"""

import time
from collections.abc import Callable
from typing import Any

from agentrl.core.environment import Environment, Info
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper


class TimeLimit(Wrapper):
    """Truncates long episodes.

    Args:
        env: The inner environment.
        max_turns: Largest number of steps of an episode.
        max_seconds: Largest duration from the start of ``reset`` in seconds, including the model's time.
        clock: Returns monotonic seconds.

    Raises:
        ValueError: Neither limit is given, or one is not above 0.
    """

    def __init__(
        self,
        env: Environment[Any, Any],
        max_turns: int | None = None,
        *,
        max_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(env)
        if max_turns is None and max_seconds is None:
            raise ValueError("TimeLimit needs max_turns or max_seconds")
        for name, value in (("max_turns", max_turns), ("max_seconds", max_seconds)):
            if value is not None and not value > 0:
                raise ValueError(f"TimeLimit({name}={value}): want more than 0")
        self.max_turns = max_turns
        self.max_seconds = max_seconds
        self._clock = clock
        self._turns = 0
        self._start = 0.0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode and reset the counters."""
        self._turns, self._start = 0, self._clock()
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> StepResult:
        """Take a step; truncate the episode if a limit is reached."""
        result: StepResult = await super().step(action)
        self._turns += 1
        reached = self._reached()
        if reached and not (result[2] or result[3]):
            return await self._truncate(result, reached)
        return result

    def _reached(self) -> str | None:
        if self.max_turns is not None and self._turns >= self.max_turns:
            return f"TimeLimit(max_turns={self.max_turns})"
        if self.max_seconds is not None and self._clock() - self._start >= self.max_seconds:
            return f"TimeLimit(max_seconds={self.max_seconds:g})"
        return None
