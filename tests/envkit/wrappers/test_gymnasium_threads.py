"""Gymnasium's blocking environments beside the event loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import StopReason, Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.wrappers import (
    GymnasiumEnvironment,
    StepTimeoutError,
)
from tests.envkit.wrappers.games import Slow, say


async def test_a_step_that_hangs_is_a_typed_error_and_the_next_reset_is_fresh(slow: Any) -> None:
    hanging = GymnasiumEnvironment(Slow, step_timeout=0.5)
    other = GymnasiumEnvironment("FrozenLake-v1")
    await hanging.reset()
    await other.reset(seed=1)
    with pytest.raises(StepTimeoutError, match=r"Slow\.step took over 0\.5 s"):
        await hanging.step(say("2"))
    assert not issubclass(StepTimeoutError, TimeoutError)
    assert (await other.step(say("left")))[2] is False
    with pytest.raises(RuntimeError, match="before reset"):
        await hanging.step(say("1"))
    await hanging.reset()
    assert slow.made == 2
    assert (await hanging.step(say("1")))[1] == 0.1
    assert not slow.closed.is_set(), "the one that hangs is closed when its step returns"
    slow.gate.set()
    assert await asyncio.to_thread(slow.closed.wait, 30)


async def test_the_event_loop_runs_on_during_a_step_and_no_two_steps_run_at_once(slow: Any) -> None:
    env = GymnasiumEnvironment(Slow)
    await env.reset()
    step = asyncio.create_task(env.step(say("2")))
    assert await asyncio.to_thread(slow.entered.wait, 30)
    for again in (env.step(say("1")), env.reset()):
        with pytest.raises(RuntimeError, match=r"before reset|while another call"):
            await again
    slow.gate.set()
    assert (await step)[1] == 0.1
    assert slow.most == 1


async def test_a_cancelled_step_leaves_its_environment_behind(slow: Any) -> None:
    env = GymnasiumEnvironment(Slow)
    await env.reset()
    step = asyncio.create_task(env.step(say("2")))
    assert await asyncio.to_thread(slow.entered.wait, 30)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await env.close()
    await env.reset()
    assert slow.made == 2
    slow.gate.set()
    assert await asyncio.to_thread(slow.closed.wait, 30)


async def test_close_during_a_step_waits_for_nothing(slow: Any) -> None:
    env = GymnasiumEnvironment(Slow)
    await env.reset()
    step = asyncio.create_task(env.step(say("2")))
    assert await asyncio.to_thread(slow.entered.wait, 30)
    await env.close()
    assert not slow.closed.is_set()
    slow.gate.set()
    with pytest.raises(RuntimeError, match="closed during a step"):
        await step
    assert await asyncio.to_thread(slow.closed.wait, 30)


async def test_on_the_loop_it_runs_where_it_is_called() -> None:
    seen: list[str] = []

    class Here(Slow):
        def step(self, action: Any) -> Any:
            seen.append(threading.current_thread().name)
            return super().step(action)

    for where in ("loop", "thread"):
        env = GymnasiumEnvironment(Here, run_in=where)  # type: ignore[arg-type]
        await env.reset()
        await env.step(say("1"))
        await env.close()
    assert seen[0] == threading.current_thread().name != seen[1]


SLOW = """
from agentrl.wrappers import GymnasiumEnvironment, TimeLimit
from tests.envkit.wrappers.games import Slow

from agentrl import Agent

def make_env(seconds=60):
    return TimeLimit(GymnasiumEnvironment(Slow, step_timeout=seconds), 3)

class Says(Agent):
    async def reset(self, *, seed=None, options=None):
        self.word = options["say"]

    async def step(self, observation, info):
        return {"role": "assistant", "content": self.word}
"""


class Client:
    waited = 0.0
    sampling: dict[str, Any] = {}  # noqa: RUF012 - a stand-in that nobody changes

    def acquire(self, *, evaluation: bool, seed: int) -> Any:
        return self, lambda: None

    given = 0.0

    def session(self, role: str = "assistant") -> Any:
        return self

    def reward(self, value: float, role: str | None = None, *, message: Any = None) -> None:
        self.given += value

    def earned(self) -> float:
        return self.given

    def trajectories(self) -> dict[str, Any]:
        return {}

    def role_rewards(self, given: Any) -> dict[str, float]:
        return dict(given)

    def drift(self) -> dict[str, float]:
        return {}


async def test_a_step_that_hangs_fails_its_own_episode_as_the_environments_error(slow: Any, tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text(SLOW)

    async def episode(word: str, **env: float) -> Any:
        workflow = AgentEnvWorkflow(f"{file}:make_env", agent=f"{file}:Says", env_kwargs=env)
        task = Task(id=word, data={"seed": 1, "say": word})
        return await run_episode(
            workflow, task, Client(), group_id="g", index=0, seed=1, limits=Limits(60.0, 9.0), left=Abandoned()
        )  # type: ignore[arg-type]

    hung, fine = await asyncio.gather(episode("2", seconds=0.5), episode("1"))
    assert hung.stop_reason == StopReason.ENVIRONMENT_ERROR and hung.reward is None
    assert "StepTimeoutError: Slow.step took over 0.5 s" in (hung.error or "")
    assert (fine.stop_reason, fine.metrics["steps"]) == (StopReason.TRUNCATED, 3.0)
