"""The episode boundary: whatever a workflow does, exactly one episode comes out.

Guarantees: an exception, a timeout or a missing reward becomes a typed record with its traceback, never a reward;
cancellation of the run itself passes through.
"""

import asyncio
import time
import traceback

from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.workflow import Outcome, RolloutWorkflow
from agentrl.inference.backend import ContextOverflow, InferenceError
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
    """Run one episode to its end, whatever that is.

    Args:
        workflow: Shared by all episodes; holds no state of one.
        task: Task of the episode.
        client: Model access.
        group_id: Group of the episode.
        index: Position in the group.
        seed: Seed of this episode.
        timeout: Seconds.
        evaluation: Use the evaluation sampling.
    """
    llm, release = client.acquire(evaluation=evaluation, seed=seed)
    start = time.monotonic()
    limit = asyncio.timeout(timeout)
    outcome, reason, error = Outcome(reward=None), StopReason.TERMINATED, None
    try:
        async with limit:
            outcome = await workflow.arun_episode(task, llm, seed=seed)
        reason = outcome.stop_reason
    except ContextOverflow as caught:
        reason, error = StopReason.CONTEXT_OVERFLOW, str(caught)
    except TimeoutError:
        text = traceback.format_exc()
        if limit.expired():
            reason, error = StopReason.TIMEOUT, f"no end within {timeout:g} s\n{text}"
        else:  # a time limit of the environment's or the agent's own
            reason, error = blame(text), text
    except InferenceError as caught:
        reason, error = StopReason.INFERENCE_ERROR, str(caught)
    except (Exception, SystemExit):  # the episode boundary: user code may raise anything, and it stays in this episode
        text = traceback.format_exc()
        reason, error = blame(text), text
    finally:
        release()
    base = {"group_id": group_id, "task_id": task.id, "index": index, "seed": seed, "seconds": time.monotonic() - start}
    try:
        return Episode(
            **base,
            trajectories=llm.trajectories(),
            reward=outcome.reward if error is None else None,
            metrics=outcome.metrics,
            drift=llm.drift() if index == 0 and not evaluation else {},  # one of a group: it costs a whole render
            stop_reason=reason,
            error=error,
        )
    except ValueError as caught:  # a workflow of the user's own gave an outcome that is none
        return Episode(**base, stop_reason=StopReason.ENVIRONMENT_ERROR, error=f"{error or ''}\n{caught}".strip())


def blame(text: str) -> StopReason:
    """Whether the environment or the agent raised: the innermost of their frames in the traceback decides."""
    env, agent = text.rfind("await env."), text.rfind("await agent.")
    return StopReason.AGENT_ERROR if agent > env else StopReason.ENVIRONMENT_ERROR
