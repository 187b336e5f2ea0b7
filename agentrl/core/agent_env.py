"""The standard workflow: one agent in one environment until either ends the episode.

Guarantees: each step's reward is credited to the message that earned it; the environment is closed whatever happens; a
wrong reward (not a finite number) is an error of the environment, never a number; a missing one (``None``) leaves the
episode without a reward, never with 0.
"""

from typing import Any

from agentrl.core.agent import Agent
from agentrl.core.contract import checked_reset, checked_reward, checked_step
from agentrl.core.environment import Environment
from agentrl.core.episode import Message, StopReason, Task
from agentrl.core.make import construct
from agentrl.core.registry import Spec, load, spec_of
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
        spec = spec_of("env", env)
        self._spec = Spec(spec.id, spec.entry_point, spec.kwargs | (env_kwargs or {}))
        self._env_class = load("env", env)
        self._agent_class = load("agent", agent)
        self._agent_kwargs = agent_kwargs or {}
        self.max_turns = max_turns
        self.make_env()

    def make_env(self) -> Environment[list[Message], Message]:
        """A new environment; one for each episode."""
        return construct(self._env_class, self._spec)

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run until terminated, truncated or ``max_turns``."""
        env = self.make_env()
        agent: Agent = self._agent_class(llm.session(), **self._agent_kwargs)
        try:
            observation, info = checked_reset(await env.reset(seed=seed, options=task.data), env)
            await agent.reset(seed=seed, options=task.data)
            total: float | None = 0.0
            metrics: dict[str, float] = {}
            for _ in range(self.max_turns):
                action = await agent.step(observation, info)
                result = await env.step(action)
                observation, reward, terminated, truncated, info = checked_step(result, env)
                if reward is None:
                    total = None
                elif total is not None:
                    total += checked_reward(reward, env)
                    llm.reward(reward)
                metrics.update(info.get("metrics", {}))
                if terminated or truncated:
                    reason = StopReason.TERMINATED if terminated else StopReason.TRUNCATED
                    return Outcome(reward=total, stop_reason=reason, metrics=metrics)
            return Outcome(reward=total, stop_reason=StopReason.TRUNCATED, metrics=metrics)
        finally:
            await env.close()
