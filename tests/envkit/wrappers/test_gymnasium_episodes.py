"""Gymnasium's environments under Gymnasium's checker, and in whole episodes."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

import agentrl
from agentrl.core.episode import StopReason, Task
from agentrl.envkit.agent_env import AgentEnvWorkflow
from agentrl.envkit.gymnasium_bridge import GymnasiumBridge
from agentrl.wrappers import GymnasiumEnvironment, RecordEpisodes, TimeLimit
from tests.envkit.wrappers.games import newest, say

TOYS = ("FrozenLake", "Blackjack", "Taxi", "CliffWalking")


@pytest.mark.parametrize("id", [*TOYS, "CartPole", "Pendulum"])
@pytest.mark.parametrize("where", ["thread", "loop"])
def test_gymnasiums_checker_and_vector_environments_take_it(id: str, where: Any, tmp_path: Path) -> None:
    def make() -> Any:
        env = GymnasiumEnvironment(newest(id), run_in=where)
        return GymnasiumBridge(TimeLimit(RecordEpisodes(env, tmp_path), 20))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(), skip_render_check=True)
        check_env(GymnasiumBridge(GymnasiumEnvironment(newest(id), run_in=where)), skip_render_check=True)
    vector = SyncVectorEnv([make, make])
    vector.reset(seed=[1, 2])
    for _ in range(3):
        vector.step((say("0"), say("<action>1</action>")))
    vector.close()


LAKE = """
from agentrl import Agent
from agentrl.wrappers import GymnasiumEnvironment, TimeLimit

def make_env(slippery=False):
    return TimeLimit(GymnasiumEnvironment("FrozenLake-v1", is_slippery=slippery), 40)

class Walker(Agent):
    '''Shortest way over what it reads.'''

    async def step(self, observation, info):
        lines = [line for line in observation[-1]["content"].splitlines() if set(line) <= set("SFHG[]")][-4:]
        rows = [line.replace("[", "").replace("]", "") for line in lines]
        row = next(i for i, line in enumerate(lines) if "[" in line)
        start = (row, lines[row].index("["))
        moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
        waiting, seen = [(start, None)], {start}
        for (r, c), first in waiting:
            if rows[r][c] == "G":
                return {"role": "assistant", "content": f"I go <action>{first}</action>"}
            for name, (dr, dc) in moves.items():
                place = (r + dr, c + dc)
                inside = 0 <= place[0] < 4 and 0 <= place[1] < 4
                if inside and place not in seen and rows[place[0]][place[1]] != "H":
                    seen.add(place)
                    waiting.append((place, first or name))
"""


class Model:
    given = 0.0

    def session(self, role: str = "assistant") -> Any:
        return self

    def reward(self, value: float, role: str | None = None, *, message: Any = None) -> None:
        self.given += value

    def earned(self) -> float:
        return self.given


async def test_a_scripted_agent_solves_the_lake_from_what_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "lake.py"
    file.write_text(LAKE)
    workflow = AgentEnvWorkflow(f"{file}:make_env", agent=f"{file}:Walker", max_turns=50)
    for task in agentrl.make(f"{file}:make_env").own_tasks("test")[:3]:
        outcome = await workflow.arun_episode(Task(id="0", data=task), Model(), seed=1)
        assert (outcome.reward, outcome.stop_reason) == (1.0, StopReason.TERMINATED)
        assert outcome.metrics == {"steps": 6.0, "invalid_actions": 0.0}


def test_a_path_with_arguments_makes_it() -> None:
    env = agentrl.make("agentrl.wrappers:GymnasiumEnvironment", env="FrozenLake-v1", is_slippery=False)
    assert env.spec is not None and env.spec.kwargs == {"env": "FrozenLake-v1", "is_slippery": False}
    with pytest.raises(TypeError, match="slippry"):
        agentrl.make("agentrl.wrappers:GymnasiumEnvironment", env="FrozenLake-v1", slippry=False)


class Mixed(gymnasium.Env[Any, Any]):
    """Takes a list of a choice and numbers, and shows a dict."""

    observation_space = spaces.Dict({"place": spaces.Box(-9, 9, (2,)), "word": spaces.Text(5)})
    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,))))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return {"place": np.zeros(2, np.float32), "word": "start"}, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return {"place": action[1], "word": "moved"}, float(action[0]), bool(action[0]), False, {}


async def test_actions_and_observations_of_several_parts() -> None:
    env = GymnasiumEnvironment(Mixed)
    (message,), _ = await env.reset()
    assert (
        "a JSON list with a whole number from 0 to 1; a JSON list of 2 numbers, each from -1 to 1" in message["content"]
    )
    assert message["content"].endswith("place: [0.0, 0.0]\nword: start")
    example = message["content"].partition("<action>")[2].partition("</action>")[0]
    assert (await env.step(say(f"<action>{example}</action>")))[1:3] == (0.0, False)
    observation, reward, terminated, *_ = await env.step(say("I do [1, [0.5, -1]]"))
    assert (observation[0]["content"], reward, terminated) == ("place: [0.5, -1.0]\nword: moved", 1.0, True)
