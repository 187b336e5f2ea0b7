"""Rewards, observations and actions through a function."""

import math
from typing import Any

import pytest

from agentrl.envkit.spaces.messages import MessageSpace
from agentrl.wrappers import ScaleReward, TransformAction, TransformObservation, TransformReward
from tests.envkit.wrappers.games import Echo, say


async def test_a_missing_reward_stays_missing_and_is_not_handed_over() -> None:
    seen: list[float] = []

    def keep(reward: float) -> float:
        seen.append(reward)
        return reward + 1

    env = TransformReward(Echo(), keep)
    await env.reset()
    assert (await env.step(say("nothing")))[1] is None
    assert (await env.step(say("a")))[1] == 1.5
    assert seen == [0.5]
    assert env.reward_range == (-math.inf, math.inf)


async def test_a_reward_is_scaled_then_clipped() -> None:
    env = ScaleReward(Echo(), scale=-4, bias=1, clip=(-2, 5))
    assert env.reward_range == (-2, 1)
    await env.reset()
    assert (await env.step(say("a")))[1] == -1.0
    assert (await env.step(say("nothing")))[1] is None
    assert (await env.step(say("bye")))[1] == -2


@pytest.mark.parametrize("wrong", [{"scale": 0}, {"bias": math.nan}, {"scale": math.inf}, {"clip": (1, 0)}])
def test_wrong_numbers_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ScaleReward"):
        ScaleReward(Echo(), **wrong)


async def test_a_function_that_gives_no_number_is_named() -> None:
    env = TransformReward(Echo(), lambda reward: math.nan)
    await env.reset()
    with pytest.raises(ValueError, match=r"TransformReward: the function made nan of 0\.5"):
        await env.step(say("a"))


async def test_observations_of_reset_and_step_are_changed() -> None:
    def loud(messages: Any) -> Any:
        return [{**message, "content": message["content"].upper()} for message in messages]

    env = TransformObservation(Echo(), loud)
    assert (await env.reset(options={"word": "x"}))[0][0]["content"] == "X"
    assert (await env.step(say("a")))[0][0]["content"] == "A"


async def test_actions_are_changed_and_may_have_a_space_of_their_own() -> None:
    env = TransformAction(Echo(), say, action_space=MessageSpace(("user",)))
    await env.reset()
    assert (await env.step("bye"))[2]
    assert env.action_space == MessageSpace(("user",))
