"""Wrappers that transform rewards, observations or actions by a function.

Guarantees: a missing reward (``None``) stays missing and never reaches the function; an invalid reward of the inner
environment raises an error that names the environment, an invalid result of the function one that names the wrapper.
The function gets the environment's own objects, not copies, and must return new ones.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from agentrl.core.contract import checked_reward
from agentrl.core.environment import Environment, Info
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper

if TYPE_CHECKING:
    from gymnasium import Space


class TransformReward(Wrapper):
    """Transforms each step's reward.

    Args:
        env: The inner environment.
        function: Function from a reward to the new reward; ``None`` makes it missing.
        reward_range: Lowest and highest new reward; unbounded by default.
    """

    def __init__(
        self,
        env: Environment[Any, Any],
        function: Callable[[float], float | None],
        *,
        reward_range: tuple[float, float] = (-math.inf, math.inf),
    ) -> None:
        super().__init__(env)
        self.function = function
        self._reward_range = reward_range

    async def step(self, action: Any) -> StepResult:
        """Take a step, and transform the reward.

        Raises:
            ValueError: The function did not return a finite number or ``None``.
        """
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, self._transformed(reward, "step"), terminated, truncated, info

    async def judge_unfinished(self) -> tuple[Any, Info]:
        """Transform the reward of an unfinished episode."""
        reward, info = await super().judge_unfinished()
        return self._transformed(reward, "judge_unfinished"), info

    def _transformed(self, reward: Any, method: str) -> Any:
        if reward is None:
            return None
        given = checked_reward(reward, self, method)
        made = self.function(given)
        if made is not None and not (isinstance(made, Real) and math.isfinite(made)):
            raise ValueError(f"{type(self).__name__}: the function made {made!r} of {given!r}; want a number")
        return made


class ScaleReward(TransformReward):
    """Changes each reward to ``reward * scale + bias``, clipped to ``clip``.

    Args:
        env: The inner environment.
        scale: Factor, not 0.
        bias: Number added to each step's scaled reward.
        clip: Lowest and highest new reward; ``None`` for no clipping.

    Raises:
        ValueError: An argument is not finite, ``scale`` is 0, or ``clip`` is in the wrong order.
    """

    def __init__(
        self,
        env: Environment[Any, Any],
        scale: float = 1.0,
        bias: float = 0.0,
        clip: tuple[float, float] | None = None,
    ) -> None:
        if not (math.isfinite(scale) and math.isfinite(bias)) or scale == 0:
            raise ValueError(f"ScaleReward(scale={scale}, bias={bias}): want finite numbers, and no scale of 0")
        if clip is not None and not clip[0] <= clip[1]:
            raise ValueError(f"ScaleReward(clip={clip}): want (lowest, highest)")
        self.scale = scale
        self.bias = bias
        self.clip = clip
        super().__init__(env, self._scaled)
        low, high = (self._scaled(edge) for edge in env.reward_range)
        self._reward_range = (min(low, high), max(low, high))

    def _scaled(self, reward: float) -> float:
        value = reward * self.scale + self.bias
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])


class TransformObservation(Wrapper):
    """Transforms each observation.

    Args:
        env: The inner environment.
        function: Function from an observation to the new one.
        observation_space: Space of the new observations, if it differs.
    """

    def __init__(
        self,
        env: Environment[Any, Any],
        function: Callable[[Any], Any],
        *,
        observation_space: "Space[Any] | None" = None,
    ) -> None:
        super().__init__(env)
        self.function = function
        self._observation_space = observation_space

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode, and transform the first observation."""
        observation, info = await super().reset(seed=seed, options=options)
        return self.function(observation), info

    async def step(self, action: Any) -> StepResult:
        """Take a step, and transform the observation."""
        observation, reward, terminated, truncated, info = await super().step(action)
        return self.function(observation), reward, terminated, truncated, info


class TransformAction(Wrapper):
    """Transforms each action before the inner environment gets it.

    Args:
        env: The inner environment.
        function: Function from the agent's action to the inner environment's.
        action_space: Space of the agent's actions, if it differs.
    """

    def __init__(
        self, env: Environment[Any, Any], function: Callable[[Any], Any], *, action_space: "Space[Any] | None" = None
    ) -> None:
        super().__init__(env)
        self.function = function
        self._action_space = action_space

    async def step(self, action: Any) -> StepResult:
        """Transform the action, and take a step."""
        self._check_running()  # before the function, which may have side effects
        return await super().step(self.function(action))
