"""Changes rewards, observations or actions by a function.

Guarantees: a missing reward (``None``) stays missing and never reaches the function; a wrong reward of the inner
environment is that environment's error, a wrong one of the function names the wrapper. The environment's own objects
are handed to the function as they are: it returns new ones.
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
    """Changes each step's reward.

    Args:
        env: The inner environment.
        function: From a reward to another; ``None`` makes it missing.
        reward_range: Lowest and highest reward that comes out; unbounded by default.
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
        """Act, and change the reward.

        Raises:
            ValueError: The function gave no finite number.
        """
        observation, reward, terminated, truncated, info = await super().step(action)
        if reward is not None:
            given = checked_reward(reward, self)
            reward = self.function(given)
            if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
                raise ValueError(f"{type(self).__name__}: the function made {reward!r} of {given!r}; want a number")
        return observation, reward, terminated, truncated, info


class ScaleReward(TransformReward):
    """``reward * scale + bias``, then clipped.

    Args:
        env: The inner environment.
        scale: Factor; not 0.
        bias: Added to each step's reward.
        clip: Lowest and highest reward that comes out.

    Raises:
        ValueError: An argument is not finite, ``scale`` is 0, or ``clip`` is upside down.
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
    """Changes each observation.

    Args:
        env: The inner environment.
        function: From an observation to another.
        observation_space: Space of what comes out, where it is another.
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
        """Start an episode, and change the first observation."""
        observation, info = await super().reset(seed=seed, options=options)
        return self.function(observation), info

    async def step(self, action: Any) -> StepResult:
        """Act, and change the observation."""
        observation, reward, terminated, truncated, info = await super().step(action)
        return self.function(observation), reward, terminated, truncated, info


class TransformAction(Wrapper):
    """Changes each action before the inner environment sees it.

    Args:
        env: The inner environment.
        function: From the agent's action to the environment's.
        action_space: Space of what the agent gives, where it is another.
    """

    def __init__(
        self, env: Environment[Any, Any], function: Callable[[Any], Any], *, action_space: "Space[Any] | None" = None
    ) -> None:
        super().__init__(env)
        self.function = function
        self._action_space = action_space

    async def step(self, action: Any) -> StepResult:
        """Change the action, and act."""
        self._check_running()  # before the function, which may count
        return await super().step(self.function(action))
