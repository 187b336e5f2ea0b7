"""Base class of wrappers: an environment that forwards every call to the environment inside it.

Guarantees: everything that a subclass does not override comes from the inner environment, including ``spec`` and tasks;
``step`` before ``reset``, or after the wrapper ended the episode, raises even if the inner environment would go on;
``close`` closes the inner environment. Attributes are forwarded by explicit properties, not by ``__getattr__``, so a
wrapper can be pickled and copied if its parts can.
"""

from typing import TYPE_CHECKING, Any

from agentrl.core.contract import checked_reset, checked_step, checked_unfinished
from agentrl.core.environment import Environment, Info
from agentrl.core.registry import Spec
from agentrl.core.task_source import Source

if TYPE_CHECKING:
    import numpy as np
    from gymnasium import Space

StepResult = tuple[Any, Any, bool, bool, Info]
"""Gymnasium's 5-tuple; the reward is ``None`` if it is missing."""


class Wrapper(Environment[Any, Any]):
    """Forwards every call; subclasses override ``reset`` or ``step`` and call ``super()``.

    Args:
        env: The inner environment.

    Attributes:
        env: The inner environment.
    """

    def __init__(self, env: Environment[Any, Any]) -> None:
        if not isinstance(env, Environment):
            raise TypeError(
                f"{type(self).__name__} wraps an agentrl.Environment, got a {type(env).__name__}; "
                "GymnasiumEnvironment makes one of a gymnasium.Env"
            )
        self.env = env
        self._observation_space: Space[Any] | None = None
        self._action_space: Space[Any] | None = None
        self._reward_range: tuple[float, float] | None = None
        self._running = False

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode of the inner environment."""
        self._running = False
        result = checked_reset(await self.env.reset(seed=seed, options=options), self)
        self._running = True
        return result

    async def step(self, action: Any) -> StepResult:
        """Take a step in the inner environment.

        Raises:
            RuntimeError: No episode is running.
        """
        self._check_running()
        result = checked_step(await self.env.step(action), self)
        self._running = not (result[2] or result[3])
        return result

    async def judge_unfinished(self) -> tuple[Any, Info]:
        """Let the inner environment judge the episode as it stands; the episode is over.

        Raises:
            RuntimeError: No episode is running.
        """
        self._check_running()
        self._running = False
        return checked_unfinished(await self.env.judge_unfinished(), self)

    async def close(self) -> None:
        """Close the inner environment; the episode is over."""
        self._running = False
        await self.env.close()

    def _check_running(self) -> None:
        if not self._running:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")

    async def _truncate(self, result: StepResult, why: str) -> StepResult:
        """Returns the step that a limit ended: the inner environment judges the episode as it stands.

        Args:
            result: The step so far, which neither terminated nor truncated.
            why: The limit, for ``info["truncated_by"]``.
        """
        observation, reward, _, _, info = result
        judged, more = checked_unfinished(await self.env.judge_unfinished(), self)
        self._running = False
        total: Any = None if reward is None or judged is None else reward + judged
        info = with_metrics(info, **more["metrics"]) if more.get("metrics") else info
        return observation, total, False, True, {**info, "truncated_by": why}

    @property
    def unwrapped(self) -> Environment[Any, Any]:
        """The environment inside all wrappers."""
        return self.env.unwrapped

    @property
    def observation_space(self) -> "Space[Any]":  # type: ignore[override]
        """The inner environment's, where the wrapper has none of its own."""
        return self.env.observation_space if self._observation_space is None else self._observation_space

    @property
    def action_space(self) -> "Space[Any]":  # type: ignore[override]
        """The inner environment's, where the wrapper has none of its own."""
        return self.env.action_space if self._action_space is None else self._action_space

    @property
    def reward_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The inner environment's, where the wrapper has none of its own."""
        return self.env.reward_range if self._reward_range is None else self._reward_range

    @property
    def spec(self) -> Spec | None:  # type: ignore[override]
        """The inner environment's spec, which describes all layers together."""
        return self.env.spec

    @spec.setter
    def spec(self, value: Spec | None) -> None:  # type: ignore[override]
        self.env.spec = value

    @property
    def chosen_task(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The inner environment's task."""
        return self.env.chosen_task

    @property
    def split(self) -> str:  # type: ignore[override]
        """The inner environment's split of its dataset."""
        return self.env.split

    @split.setter
    def split(self, value: str) -> None:  # type: ignore[override]
        self.env.split = value

    @property
    def dataset(self) -> Source | None:  # type: ignore[override]
        """The inner environment's."""
        return self.env.dataset

    @property
    def dataset_kwargs(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner environment's."""
        return self.env.dataset_kwargs

    @property
    def tools(self) -> list[Any]:
        """The inner environment's tools; none where it has none."""
        return getattr(self.env, "tools", [])

    @property
    def np_random(self) -> "np.random.Generator":
        """The inner environment's random numbers."""
        return self.env.np_random

    def choose_task(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        """Lets the inner environment choose the task."""
        return self.env.choose_task(seed, options)

    def own_tasks(self, split: str) -> list[dict[str, Any]]:  # type: ignore[override]
        """Returns the inner environment's tasks."""
        return self.env.own_tasks(split)

    def read_tasks(self, split: str) -> tuple[list[dict[str, Any]], str]:  # type: ignore[override]
        """Returns the inner environment's tasks, and a sentence about their source."""
        return self.env.read_tasks(split)

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns an attribute of this wrapper or of the nearest inner layer that has it, as in Gymnasium.

        Raises:
            AttributeError: No layer has the attribute.
        """
        if hasattr(self, name):
            return getattr(self, name)
        return self.env.get_wrapper_attr(name) if isinstance(self.env, Wrapper) else getattr(self.env, name)

    def __repr__(self) -> str:
        inner = repr(self.env) if isinstance(self.env, Wrapper) else type(self.env).__name__
        return f"{type(self).__name__}({inner})"


def with_metrics(info: Info, **metrics: float) -> Info:
    """Returns a copy of ``info`` with further metrics."""
    return {**info, "metrics": {**info.get("metrics", {}), **metrics}}
