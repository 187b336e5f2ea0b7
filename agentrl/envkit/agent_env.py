"""The standard workflow: one agent acts in one environment until the episode ends.

Guarantees: each step's reward is credited to the message that the agent returned; the environment is always closed,
within a time limit, in the task that made it, and a ``close`` that raises or hangs costs no reward; a reward that is
not a finite number raises an error that names the environment; if a reward is missing (``None``), the episode has no
reward, never 0. An episode that the run ends, because the policy ran out of context or of turns, keeps what its steps
earned, and the environment judges it as it stands. So does one whose time is over while the agent thinks
(``rollout.on_timeout=judge``), if the policy has sampled anything; in the middle of a step nothing can be judged.
"""

import asyncio
import copy
import inspect
import traceback
from dataclasses import replace
from typing import Any

from agentrl.core.agent import Agent, ContextOverflow, inference_error
from agentrl.core.contract import checked_reset, checked_reward, checked_step, checked_unfinished, where
from agentrl.core.environment import Environment
from agentrl.core.episode import Message, StopReason, Task
from agentrl.core.registry import Spec, load, spec_of
from agentrl.core.valid_text import valid_data
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.envkit.make import construct, discard
from agentrl.envkit.reward_function import RewardFunction


class AgentEnvWorkflow(RolloutWorkflow):
    """Runs an agent in an environment.

    The constructor makes one environment as a test, so that wrong arguments raise before any episode.

    Args:
        env: Registered id or path of the environment.
        agent: Registered id or path of the agent.
        env_kwargs: Arguments of the environment.
        agent_kwargs: Arguments of the agent.
        max_turns: Number of actions after which the episode is truncated, see
            :meth:`~agentrl.Environment.judge_unfinished`.
        reward: Registered id or path of a sync or async function that judges whole episodes instead of the
            environment: ``(task, messages, reward, **reward_kwargs)``, where ``reward`` is the environment's, to the
            reward or ``(reward, metrics)``.
        reward_kwargs: Further arguments of that function.
        close_timeout: Seconds after which the environment's ``close`` is cut.
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
        close_timeout: float = 30.0,
    ) -> None:
        spec = spec_of("env", env)
        self._spec = Spec(spec.id, spec.entry_point, spec.kwargs | (env_kwargs or {}))
        self._env_class = load("env", env)
        self._agent_class = load("agent", agent)
        self._agent_kwargs = agent_kwargs or {}
        self.max_turns = max_turns
        self._close_timeout = close_timeout
        self._judge = RewardFunction(reward, reward_kwargs or {}) if reward is not None else None
        try:
            discard(self.make_env())
        except TypeError as error:
            cause = error.__cause__ or error
            raise TypeError(f"env.id={env} with env.kwargs={env_kwargs or {}}: {cause}") from error
        try:
            inspect.signature(self._agent_class).bind(None, **self._agent_kwargs)
        except TypeError as error:
            raise TypeError(f"agent.id={agent} with agent.kwargs={self._agent_kwargs}: {error}") from error

    def make_env(self) -> Environment[list[Message], Message]:
        """Makes a new environment; each episode has its own."""
        return construct(self._env_class, self._spec)

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run until terminated, truncated, out of context or ``max_turns``.

        Raises:
            ContextOverflow: The prompt does not fit the context, and the policy has sampled nothing.
        """
        env = self.make_env()
        try:
            outcome = await self._play(env, task, llm, seed)
        except BaseException as error:  # only noted: it is raised again
            trouble, _ = await self._closed(env)
            if trouble:
                error.add_note(trouble)
            raise
        try:
            trouble, cut = await self._closed(env)
        except asyncio.CancelledError:  # in the middle of it: it is called once more, so that nothing is left
            await self._closed(env)
            raise
        return replace(outcome, close_error=trouble or None, abandoned=cut)

    async def _closed(self, env: Environment[list[Message], Message]) -> tuple[str, bool]:
        """Closes an environment; returns what went wrong, and whether ``close`` was cut at its limit."""
        limit = asyncio.timeout(self._close_timeout)
        try:
            async with limit:
                await env.close()
        except Exception as error:  # a boundary: the episode is over, and its end is what counts
            text = "".join(traceback.format_exception(error)).strip()
            if not limit.expired():
                return f"{where(env, 'close')} raised:\n{text}", False
            seconds = f"{self._close_timeout:g} s (rollout.close_timeout)"
            return f"{text}\n{where(env, 'close')} did not end within {seconds}: it was cut", True
        return "", False

    async def _play(self, env: Environment[list[Message], Message], task: Task, llm: LLM, seed: int) -> Outcome:
        agent: Agent = self._agent_class(llm, **self._agent_kwargs)
        # Copies: the task belongs to the whole group.
        started = await env.reset(seed=seed, options=copy.deepcopy(task.data))
        observation, info = valid_data(checked_reset(started, env))
        await agent.reset(seed=seed, options=copy.deepcopy(task.data))
        said, metrics = list(observation), dict(info.get("metrics", {}))
        rewards: list[float | None] = []
        reason: StopReason | None = None
        while reason is None and len(rewards) < self.max_turns:
            try:
                action = valid_data(await agent.step(observation, info))
            except asyncio.CancelledError:
                job = asyncio.current_task()
                if job is None or not (llm.out_of_time and llm.sampled):
                    raise
                job.uncancel()  # the judgement has the time of a teardown
                reason = StopReason.TIMEOUT
                break
            except Exception as error:  # only looked at: that of an SDK may have been raised from ours
                if not isinstance(inference_error(error), ContextOverflow) or not llm.sampled:
                    raise  # where nothing was sampled, the task itself does not fit: no policy could do better
                reason = StopReason.CONTEXT_OVERFLOW
                break
            result = await env.step(action)
            observation, reward, terminated, truncated, info = valid_data(checked_step(result, env))
            _note(llm, rewards, None if reward is None else checked_reward(reward, env), action)
            metrics.update(info.get("metrics", {}))
            said += [action, *observation]
            reason = StopReason.TERMINATED if terminated else StopReason.TRUNCATED if truncated else None
        if reason in (None, StopReason.CONTEXT_OVERFLOW, StopReason.TIMEOUT):
            reward, info = checked_unfinished(await env.judge_unfinished(), env)
            _note(llm, rewards, None if reward is None else checked_reward(reward, env, "judge_unfinished"))
            metrics.update(info.get("metrics", {}))
        total = await self._judged(task, llm, said, rewards, metrics)
        answer = info.get("extracted_answer")
        return Outcome(reward=total, stop_reason=reason or StopReason.TRUNCATED, metrics=metrics, answer=answer)

    async def _judged(
        self, task: Task, llm: LLM, said: list[Message], rewards: list[float | None], metrics: dict[str, float]
    ) -> float | None:
        """Returns the episode's reward: the sum of the environment's and the agent's, or what the function says."""
        earned = llm.earned()
        total = None if None in rewards else earned
        if self._judge is not None:
            total, more = await self._judge(task.data, said, total)
            metrics.update(more)
            if total is not None:  # the last message gets the difference to the environment's rewards
                llm.reward(total - earned)
        return total


def _note(llm: LLM, rewards: list[float | None], reward: float | None, action: Message | None = None) -> None:
    """Adds a reward to the episode's, and credits the action with it, or the last sampled message."""
    rewards.append(reward)
    if reward is not None:
        llm.reward(reward, message=action)
