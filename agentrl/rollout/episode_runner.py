"""Runs one episode and returns exactly one record, whatever the workflow does.

Guarantees: an exception, a timeout or a missing reward becomes a failed episode with a typed reason and the traceback,
never a reward; cancellation of the run itself is not caught. Running out of context is no failure unless the very first
prompt does not fit: the episode keeps the step rewards that it earned. The recorded stop reason tells whether the last
answer was cut (:mod:`agentrl.core.ending`).
"""

import asyncio
import time
import traceback
from dataclasses import replace

from agentrl.core.agent import ContextOverflow, InferenceError
from agentrl.core.contract import checked_metrics, finite, source_of
from agentrl.core.ending import stop_reason
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import Outcome, RolloutWorkflow
from agentrl.inference.client import Client


async def run_episode(
    workflow: RolloutWorkflow,
    task: Task,
    client: Client,
    *,
    group_id: str,
    index: int,
    seed: int,
    timeout: float,
    evaluation: bool = False,
) -> Episode:
    """Run one episode and return its record, failed or not.

    Args:
        workflow: Workflow shared by all episodes; it keeps no state of a single episode.
        task: Task of the episode.
        client: Client that opens a session for the episode.
        group_id: Id of the episode's group.
        index: Position of the episode in its group.
        seed: Seed of this episode.
        timeout: Time limit in seconds.
        evaluation: Whether to use the sampling parameters of evaluation.
    """
    llm, release = client.acquire(evaluation=evaluation, seed=seed)
    start = time.monotonic()
    limit = asyncio.timeout(timeout)
    outcome, reason, error = Outcome(reward=None), StopReason.TERMINATED, None
    try:
        async with limit:
            outcome = checked_outcome(await workflow.arun_episode(task, llm, seed=seed), workflow)
        reason = outcome.stop_reason
    except ContextOverflow as caught:
        outcome = Outcome(reward=llm.earned() if llm.sampled else None)
        reason, error = StopReason.CONTEXT_OVERFLOW, str(caught)
    except TimeoutError:
        text = traceback.format_exc()
        if limit.expired():
            reason, error = StopReason.TIMEOUT, f"no end within {timeout:g} s\n{text}"
        else:  # the environment or the agent has a time limit of its own
            reason, error = blame(text), text
    except InferenceError as caught:
        reason, error = StopReason.INFERENCE_ERROR, str(caught)
    except (Exception, SystemExit):  # the episode boundary: user code may raise anything, and only this episode fails
        text = traceback.format_exc()
        reason, error = blame(text), text
    finally:
        release()
    trajectories = llm.trajectories()
    base = {"group_id": group_id, "task_id": task.id, "index": index, "seed": seed, "seconds": time.monotonic() - start}
    tag = task.data.get("tag")
    try:
        return Episode(
            **base,
            trajectories=trajectories,
            reward=outcome.reward,
            role_rewards={} if outcome.reward is None else llm.role_rewards(outcome.rewards),
            tag=tag if isinstance(tag, str) else None,
            metrics=outcome.metrics,
            drift=llm.drift() if index == 0 and not evaluation else {},  # one per group: it renders a whole chat
            stop_reason=stop_reason(reason, trajectories),
            error=error,
        )
    except ValueError as caught:  # a user's workflow returned an invalid outcome
        return Episode(**base, stop_reason=StopReason.ENVIRONMENT_ERROR, error=f"{error or ''}\n{caught}".strip())


def checked_outcome(outcome: object, workflow: RolloutWorkflow) -> Outcome:
    """Returns what a workflow returned, if it is an :class:`~agentrl.Outcome` with a valid reward.

    Raises:
        TypeError: It is no outcome, or its reward is not a number.
        ValueError: The reward is not finite.
    """
    place = source_of(workflow.arun_episode)
    if not isinstance(outcome, Outcome):
        raise TypeError(f"{place} returned {outcome!r:.200}; want an Outcome")
    reward = None if outcome.reward is None else finite(outcome.reward, place)
    rewards = {role: finite(value, f"{place}, reward of role {role!r},") for role, value in outcome.rewards.items()}
    metrics = checked_metrics(outcome.metrics, f"{place} returned metrics")
    return replace(outcome, reward=reward, rewards=rewards, metrics=metrics)


def blame(text: str) -> StopReason:
    """Decides whether the environment or the agent raised, by the innermost of their frames in the traceback."""
    env, agent = text.rfind("await env."), text.rfind("await agent.")
    return StopReason.AGENT_ERROR if agent > env else StopReason.ENVIRONMENT_ERROR
