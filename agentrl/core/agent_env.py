"""The standard workflow: one agent in one environment until either ends the episode.

Guarantees: each step's reward is credited to the message that earned it; the environment is closed whatever happens; a
wrong reward (not a finite number) is an error of the environment, never a number.
"""

import math
from typing import Any

from agentrl.core.agent import Agent
from agentrl.core.environment import LanguageEnvironment
from agentrl.core.episode import StopReason, Task
from agentrl.core.registry import load
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow


class AgentEnvWorkflow(RolloutWorkflow):
    """Agent x environment.

    The environment is made once here, so that wrong arguments are an error before any episode.

    Args:
        env: Registered id or path of the environment, and ``env_kwargs`` for it.
        agent: Registered id or path of the agent, and ``agent_kwargs`` for it.
        max_turns: Actions after which the episode is truncated.
    """

    def __init__(
        self,
        env: str,
        agent: str = "chat",
        env_kwargs: dict[str, Any] | None = None,
        agent_kwargs: dict[str, Any] | None = None,
        max_turns: int = 32,
    ) -> None:
        self._env_class = load("env", env)
        self._agent_class = load("agent", agent)
        self._env_kwargs = env_kwargs or {}
        self._agent_kwargs = agent_kwargs or {}
        self.max_turns = max_turns
        try:
            self.make_env()
        except TypeError as error:
            raise TypeError(f"env.id={env} with env.kwargs={self._env_kwargs}: {error}") from error

    def make_env(self) -> LanguageEnvironment:
        """A new environment; one for each episode."""
        return self._env_class(**self._env_kwargs)

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run until terminated, truncated or ``max_turns``."""
        env = self.make_env()
        agent: Agent = self._agent_class(llm.session(), **self._agent_kwargs)
        try:
            observation, info = await env.reset(seed=seed, options=task.data)
            await agent.reset(seed=seed, options=task.data)
            total = 0.0
            metrics: dict[str, float] = {}
            for _ in range(self.max_turns):
                action = await agent.step(observation, info)
                observation, reward, terminated, truncated, info = await env.step(action)
                total += checked_reward(reward, env)
                llm.reward(reward)
                metrics.update(info.get("metrics", {}))
                if terminated or truncated:
                    reason = StopReason.TERMINATED if terminated else StopReason.TRUNCATED
                    return Outcome(reward=total, stop_reason=reason, metrics=metrics)
            return Outcome(reward=total, stop_reason=StopReason.TRUNCATED, metrics=metrics)
        finally:
            await env.close()


def checked_reward(reward: Any, env: object) -> float:
    """``reward`` as a float.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite.
    """
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(
            f"{type(env).__name__}.step returned reward {reward!r}, a {type(reward).__name__}; want a float"
        )
    if not math.isfinite(reward):
        raise ValueError(f"{type(env).__name__}.step returned reward {reward!r}; want a finite float")
    return float(reward)
