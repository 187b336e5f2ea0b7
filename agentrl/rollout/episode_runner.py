"""Runs one episode and returns exactly one record, whatever the workflow does.

Guarantees: an exception, a timeout or a missing reward becomes a failed episode with a typed reason and the traceback,
never a reward; a cancellation from outside goes through, and what there was can be had as a record. An episode takes no
longer than its time limit and that of its teardown (:mod:`agentrl.rollout.deadline`); after its record is made, a task
that it left gets no answers and changes nothing. A ``close`` that raises or hangs costs no reward. Running out of
context is no failure unless the very first prompt does not fit: the episode keeps the step rewards that it earned. One
whose time is over keeps its reward if its workflow could still judge what there was, where that is asked for. The
recorded stop reason tells whether the last answer was cut (:mod:`agentrl.core.ending`).
"""

import asyncio
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from agentrl.core.agent import ContextOverflow, InferenceError, inference_error
from agentrl.core.contract import checked_metrics, finite, source_of
from agentrl.core.ending import stop_reason
from agentrl.core.episode import Episode, StopReason, Task, tag_of
from agentrl.core.infrastructure import infrastructure_failure
from agentrl.core.valid_text import valid_text
from agentrl.core.workflow import Outcome, RolloutWorkflow
from agentrl.inference.client import Client, EpisodeLLM
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Ended, Limits, within


async def run_episode(
    workflow: RolloutWorkflow,
    task: Task,
    client: Client,
    *,
    group_id: str,
    index: int,
    seed: int,
    limits: Limits,
    left: Abandoned,
    evaluation: bool = False,
    version: int | None = None,
    attempt: int = 0,
    judge_late: bool = False,
    cancelled: Callable[[Episode], None] | None = None,
) -> Episode:
    """Run one episode and return its record, failed or not.

    Args:
        workflow: Workflow shared by all episodes; it keeps no state of a single episode.
        task: Task of the episode.
        client: Client that opens a session for the episode.
        group_id: Id of the episode's group.
        index: Position of the episode in its group.
        seed: Seed of this episode.
        limits: Time limits of the episode and of its teardown.
        left: Takes the episode's task if it has to be abandoned.
        evaluation: Whether to use the sampling parameters of evaluation.
        version: Policy version that is served, for the record.
        attempt: Number of earlier attempts, for the record.
        judge_late: Whether a workflow may judge the episode when its time is over.
        cancelled: Called with a record of what there was, if this call is cancelled.
    """
    llm, release = client.acquire(evaluation=evaluation, seed=seed)
    now = asyncio.get_running_loop().time
    start = now()
    base: dict[str, Any] = {
        "group_id": group_id,
        "task_id": task.id,
        "index": index,
        "seed": seed,
        "task": task.data,
        "started": _clock(),
        "version": version,
        "attempt": attempt,
        "retried": False,
        "sampling": llm.sampling,
        "abandoned": False,
    }

    def late() -> None:
        llm.out_of_time = judge_late

    try:
        end = _end(await within(limits, _attempt(workflow, task, llm, seed), left, lambda: llm.waited, late))
    except asyncio.CancelledError:
        if cancelled is not None:
            end = _failed(StopReason.CANCELLED, "cancelled before its end")
            base["seconds"] = now() - start
            cancelled(_record(base, task, llm, end, drift=False))
        raise
    finally:
        release()
    base["seconds"], base["abandoned"] = now() - start, end.abandoned
    drift = index == 0 and not evaluation  # one per group: it renders a whole chat
    try:
        return _record(base, task, llm, end, drift=drift)
    except ValueError as caught:  # a user's workflow returned an invalid outcome
        text = f"{end.error or ''}\n{caught}".strip()
        return _record(base, task, llm, _failed(StopReason.ENVIRONMENT_ERROR, text), drift=False)


def _clock() -> str:
    """Returns the time as ISO 8601 in UTC, with milliseconds."""
    seconds, rest = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{rest:03d}+00:00"


@lru_cache(1)  # episodes begin in crowds
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()


@dataclass(frozen=True)
class _End:
    """End of an episode: what the workflow returned, or why there is nothing."""

    outcome: Outcome
    reason: StopReason
    error: str | None = None
    abandoned: bool = False


async def _attempt(workflow: RolloutWorkflow, task: Task, llm: EpisodeLLM, seed: int) -> _End:
    """Runs the workflow; whatever it raises becomes data, but for the cancellation of this task."""
    try:
        outcome = checked_outcome(await workflow.arun_episode(task, llm, seed=seed), workflow)
    except InferenceError as caught:
        return _refused(caught, caught, llm)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as caught:  # the episode boundary: user code may raise anything, and only this episode fails
        job = asyncio.current_task()
        if isinstance(caught, asyncio.CancelledError) and job is not None and job.cancelling():
            if notes := getattr(caught, "__notes__", None):  # of a teardown that failed
                return _failed(StopReason.ENVIRONMENT_ERROR, "\n".join(notes))
            raise
        known = inference_error(caught)
        if known is not None:  # an SDK's exception that was raised for it
            return _refused(known, caught, llm)
        text = traceback.format_exc()
        of_machines = infrastructure_failure(caught) is not None
        return _failed(StopReason.INFRASTRUCTURE_ERROR if of_machines else blame(text), text)
    return _End(outcome, outcome.stop_reason, outcome.close_error, outcome.abandoned)


def _refused(error: InferenceError, caught: BaseException, llm: EpisodeLLM) -> _End:
    """Returns the end of an episode whose session raised ``error``, which reached the boundary as ``caught``."""
    if not isinstance(error, ContextOverflow):
        return _failed(StopReason.INFERENCE_ERROR, _said(error, caught))
    earned = llm.earned() if llm.sampled else None
    return _End(Outcome(reward=earned), StopReason.CONTEXT_OVERFLOW, _said(error, caught))


def _end(ended: Ended[_End]) -> _End:
    """Returns the end of an episode, from that of its task."""
    job = ended.job
    if not ended.overdue:
        if job.cancelled():
            return _failed(StopReason.ENVIRONMENT_ERROR, "the environment or the agent cancelled the episode's task")
        return job.result()
    known = None if not job.done() or job.cancelled() else job.result()
    judged = known is not None and known.reason is StopReason.TIMEOUT and known.outcome.reward is not None
    then = known.error if known is not None else ""
    text = f"after its cancellation:\n{then}\n{ended.overdue}" if then else ended.overdue
    end = known if judged and known is not None else _failed(StopReason.TIMEOUT, text)
    return replace(end, error=text, abandoned=ended.abandoned or end.abandoned)


def _failed(reason: StopReason, error: str) -> _End:
    return _End(Outcome(reward=None), reason, error)


def _said(error: BaseException, noted: BaseException) -> str:
    """Returns an exception's message, and the notes of the one that was caught."""
    return "\n".join([str(error), *getattr(noted, "__notes__", ())])


def _record(base: dict[str, Any], task: Task, llm: EpisodeLLM, end: _End, *, drift: bool) -> Episode:
    """Makes the record of an episode.

    Raises:
        ValueError: The workflow's outcome does not fit the episode.
    """
    trajectories = llm.trajectories()
    outcome = end.outcome
    own = {
        **base,
        "trajectories": trajectories,
        "reward": outcome.reward,
        "role_rewards": {} if outcome.reward is None else llm.role_rewards(outcome.rewards),
        "tag": tag_of(task.data),
        "metrics": outcome.metrics,
        "drift": llm.drift() if drift else {},
        "stop_reason": stop_reason(end.reason, trajectories),
        "error": None if end.error is None else valid_text(str(end.error)),
        "answer": None if outcome.answer is None else valid_text(str(outcome.answer)),
    }
    return Episode.of_checked(own)  # every value was checked where it came in


def checked_outcome(outcome: object, workflow: RolloutWorkflow) -> Outcome:
    """Returns what a workflow returned, if it is an :class:`~agentrl.Outcome` with a valid reward.

    Raises:
        TypeError: It is no outcome, or its reward is not a number.
        ValueError: The reward is not finite, or the stop reason is none.
    """
    if isinstance(outcome, Outcome) and _is_plain(outcome):
        return outcome
    place = source_of(workflow.arun_episode)
    if not isinstance(outcome, Outcome):
        raise TypeError(f"{place} returned {outcome!r:.200}; want an Outcome")
    reward = None if outcome.reward is None else finite(outcome.reward, place)
    rewards = {role: finite(value, f"{place}, reward of role {role!r},") for role, value in outcome.rewards.items()}
    metrics = checked_metrics(outcome.metrics, f"{place} returned metrics")
    return replace(
        outcome, reward=reward, rewards=rewards, metrics=metrics, stop_reason=StopReason(outcome.stop_reason)
    )


def _is_plain(outcome: Outcome) -> bool:
    """Whether an outcome needs no check: floats that are finite, and names of ASCII characters."""
    reward, metrics = outcome.reward, outcome.metrics
    return (
        (reward is None or (type(reward) is float and math.isfinite(reward)))
        and not outcome.rewards
        and type(metrics) is dict
        and type(outcome.stop_reason) is StopReason
        and all(
            type(name) is str and name.isascii() and type(value) is float and math.isfinite(value)
            for name, value in metrics.items()
        )
    )


def blame(text: str) -> StopReason:
    """Decides whether the environment or the agent raised, by the innermost of their frames in the traceback."""
    env, agent = text.rfind("await env."), text.rfind("await agent.")
    return StopReason.AGENT_ERROR if agent > env else StopReason.ENVIRONMENT_ERROR
