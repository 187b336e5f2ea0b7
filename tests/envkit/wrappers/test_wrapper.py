"""The base wrapper, and what all wrappers have in common."""

import asyncio
import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

import agentrl
from agentrl.core.episode import StopReason, Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.envkit.gymnasium_bridge import GymnasiumBridge
from agentrl.wrappers import (
    ContextLimit,
    RecordEpisodes,
    ScaleReward,
    TimeLimit,
    ToolBudget,
    TransformAction,
    TransformObservation,
    TransformReward,
    Wrapper,
)
from tests.envkit.wrappers.games import Echo, Shop, buy, play, say


def half(reward: float) -> float:
    return reward / 2


def same(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value)


MAKERS = {
    "wrapper": lambda env, folder: Wrapper(env),
    "time": lambda env, folder: TimeLimit(env, 3),
    "record": lambda env, folder: RecordEpisodes(env, folder),
    "reward": lambda env, folder: TransformReward(env, half),
    "scale": lambda env, folder: ScaleReward(env, 2, 1, (-1, 2)),
    "observation": lambda env, folder: TransformObservation(env, same),
    "action": lambda env, folder: TransformAction(env, same),
    "tools": lambda env, folder: ToolBudget(env, 2),
    "context": lambda env, folder: ContextLimit(env, 10_000, max_result_chars=100),
    "tower": lambda env, folder: TimeLimit(ToolBudget(ScaleReward(RecordEpisodes(env, folder), 2), 2), 3),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_what_is_not_changed_is_the_inner_environments() -> None:
    inner = Shop()
    env = Wrapper(Wrapper(inner))
    assert env.unwrapped is inner
    assert env.tools == inner.tools and Wrapper(Echo()).tools == []
    assert env.action_space == inner.action_space and env.observation_space == inner.observation_space
    assert env.get_wrapper_attr("max_tool_turns") == 8
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        env.get_wrapper_attr("nothing_of_the_kind")
    assert repr(env) == "Wrapper(Wrapper(Shop))"


def test_tasks_and_split_are_the_inner_environments() -> None:
    inner = Echo()
    env = Wrapper(Wrapper(inner))
    assert env.own_tasks("test") == inner.own_tasks("test") == [{"word": "e"}, {"word": "j"}]
    assert env.read_tasks("train")[0] == inner.read_tasks("train")[0]
    env.split = "test"
    assert inner.split == env.split == "test"
    assert env.choose_task(1, None) in inner.own_tasks("test")
    assert env.np_random is inner.np_random and env.dataset is Echo.dataset


def test_a_gymnasium_environment_is_refused_with_what_to_use() -> None:
    with pytest.raises(TypeError, match="GymnasiumEnvironment makes one"):
        Wrapper(gymnasium.make("FrozenLake-v1"))  # type: ignore[arg-type]


@each
def test_a_step_outside_of_an_episode_is_an_error(make: Any, tmp_path: Path) -> None:
    env = make(Echo(), tmp_path)
    with pytest.raises(RuntimeError, match="before reset, or after"):
        play_step(env, say("a"))
    play(env, "a", "bye")
    with pytest.raises(RuntimeError, match="before reset, or after"):
        play_step(env, say("a"))


def play_step(env: Any, action: Any) -> Any:
    return asyncio.run(env.step(action))


@each
async def test_close_reaches_the_inner_environment(make: Any, tmp_path: Path) -> None:
    inner = Echo()
    env = make(inner, tmp_path)
    await env.reset()
    await env.close()
    await env.close()
    assert inner.closed >= 1
    with pytest.raises(RuntimeError):
        await env.step(say("a"))
    assert (await env.reset(options={"word": "x"}))[0][0]["content"] == "x"


@each
def test_wrappers_can_be_pickled_and_copied(make: Any, tmp_path: Path) -> None:
    env = make(Echo(), tmp_path)
    first = play(env, "a", seed=4)
    for other in (pickle.loads(pickle.dumps(env)), copy.deepcopy(env)):
        assert other.env is not env.env
        assert play(other, "a", seed=4) == first


@each
@pytest.mark.parametrize("inner", [Echo, Shop])
def test_gymnasiums_checker_and_vector_environments_take_each(make: Any, inner: Any, tmp_path: Path) -> None:
    class WithTasks(inner):
        dataset = [{"word": "a"}] * 5

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(GymnasiumBridge(make(WithTasks(), tmp_path)), skip_render_check=True)
    vector = SyncVectorEnv([lambda: GymnasiumBridge(make(WithTasks(), tmp_path)) for _ in range(2)])
    vector.reset(seed=3)
    for _ in range(4):
        observations, rewards, *_ = vector.step(tuple(say("hello") for _ in range(2)))
        assert len(observations) == len(rewards) == 2
    vector.close()


MINE = """
from agentrl.wrappers import TimeLimit
from tests.envkit.wrappers.games import Echo

from agentrl import Agent

def make_env(turns=4):
    return TimeLimit(Echo(), turns)

class Talker(Agent):
    async def step(self, observation, info):
        return {"role": "assistant", "content": "and on"}
"""


class Model:
    def __init__(self) -> None:
        self.rewards: list[float] = []

    def session(self, role: str = "assistant") -> Any:
        return self

    def reward(self, value: float, role: str | None = None, *, message: Any = None) -> None:
        self.rewards.append(value)

    def earned(self) -> float:
        return sum(self.rewards)


async def test_a_function_that_wraps_is_an_environment_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    env = agentrl.make(f"{file}:make_env", turns=2)
    assert env.spec is not None and env.spec.kwargs == {"turns": 2}
    assert env.unwrapped.spec is env.spec
    assert env.read_tasks("test")[0] == [{"word": "e"}, {"word": "j"}]
    workflow = AgentEnvWorkflow(f"{file}:make_env", agent=f"{file}:Talker")
    model = Model()
    outcome = await workflow.arun_episode(Task(id="0", data={"word": "x"}), model, seed=1)
    assert (outcome.reward, outcome.stop_reason) == (2.0, StopReason.TRUNCATED)
    assert model.rewards == [0.5] * 4
    with pytest.raises(TypeError, match="trns"):
        agentrl.make(f"{file}:make_env", trns=2)


async def test_a_wrong_tuple_names_the_inner_environment() -> None:
    class Wrong(Echo):
        async def step(self, action: Any) -> Any:
            return [], 1.0, True, {}

    env = TimeLimit(Wrong(), 2)
    await env.reset()
    with pytest.raises(TypeError, match=r"Wrong\.step .* returned 4 values"):
        await env.step(buy("pen"))
