"""The standard workflow: one agent in one environment until either ends the episode.

Guarantees: each step's reward is credited to the message that earned it; the environment is closed whatever happens; a
wrong reward (not a finite number) is an error of the environment, never a number; a missing one (``None``) leaves the
episode without a reward, never with 0.
"""

import copy
from typing import Any

from agentrl.core.agent import Agent
from agentrl.core.contract import checked_judgement, checked_reset, checked_reward, checked_step
from agentrl.core.environment import Environment, read_judgement
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
        reward: Registered id or path of a function that judges the whole episode instead of the environment, and
            ``reward_kwargs`` for it: ``(task, messages, reward, **reward_kwargs)``, with the environment's reward;
            sync or async; gives the reward, or ``(reward, metrics)``.
    """

    def __init__(
        self,
        env: str,
        agent: str = "chat",
        env_kwargs: dict[str, Any] | None = None,
        agent_kwargs: dict[str, Any] | None = None,
        max_turns: int = 32,
        reward: str | None = None,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        spec = spec_of("env", env)
        self._spec = Spec(spec.id, spec.entry_point, spec.kwargs | (env_kwargs or {}))
        self._env_class = load("env", env)
        self._agent_class = load("agent", agent)
        self._agent_kwargs = agent_kwargs or {}
        self.max_turns = max_turns
        self._judge = load("reward", reward) if reward is not None else None
        self._judge_kwargs = reward_kwargs or {}
        try:
            self.make_env()
        except TypeError as error:
            cause = error.__cause__ or error
            raise TypeError(f"env.id={env} with env.kwargs={env_kwargs or {}}: {cause}") from error

    def make_env(self) -> Environment[list[Message], Message]:
        """A new environment; one for each episode."""
        return construct(self._env_class, self._spec)

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run until terminated, truncated or ``max_turns``."""
        env = self.make_env()
        agent: Agent = self._agent_class(llm.session(), **self._agent_kwargs)
        try:
            observation, info = checked_reset(await env.reset(seed=seed, options=copy.deepcopy(task.data)), env)
            await agent.reset(seed=seed, options=task.data)
            total: float | None = 0.0
            metrics: dict[str, float] = {}
            terminated = False
            said = list(observation)
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
                said += [action, *observation]
                if terminated or truncated:
                    break
            reason = StopReason.TERMINATED if terminated else StopReason.TRUNCATED
            if self._judge is not None:
                total = await self._judged(task, said, total, metrics, llm)
            return Outcome(reward=total, stop_reason=reason, metrics=metrics)
        finally:
            await env.close()

    async def _judged(
        self, task: Task, said: list[Message], total: float | None, metrics: dict[str, float], llm: LLM
    ) -> float | None:
        """The reward function's reward; what it differs by is credited to the last message."""
        assert self._judge is not None
        judged, more = await read_judgement(self._judge(task.data, said, total, **self._judge_kwargs))
        metrics.update(more)
        if judged is None:
            return None
        reward = checked_judgement(judged, self._judge)
        llm.reward(reward - (total or 0.0))
        return reward
