"""Gymnasium's environments for language agents: words, answers, sources."""

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from agentrl.envkit.wrappers.toy_text import GAMES
from agentrl.envkit.wrappers.translate import without_colours
from agentrl.wrappers import (
    GymnasiumEnvironment,
    ParseError,
    TimeLimit,
    UnsupportedSpaceError,
)
from tests.envkit.wrappers.games import Slow, newest, say

TOYS = ("FrozenLake", "Blackjack", "Taxi", "CliffWalking")
each = pytest.mark.parametrize("name", TOYS)


async def test_the_first_message_has_rules_actions_and_the_observation() -> None:
    env = GymnasiumEnvironment("FrozenLake-v1")
    (message,), info = await env.reset(seed=1)
    assert message["role"] == "user"
    assert "Cross the frozen lake" in message["content"]
    assert "left, down, right, up" in message["content"] and "<action>left</action>" in message["content"]
    assert message["content"].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert info["metrics"] == {"steps": 0.0, "invalid_actions": 0.0}
    await env.close()


async def test_instructions_names_description_and_parser_can_be_given() -> None:
    def parse(text: str) -> int:
        if "go" not in text:
            raise ParseError("say go")
        return 9 if "far" in text else 1

    env = GymnasiumEnvironment("FrozenLake-v1", instructions="Play.", describe=lambda at: f"At {at}.", parse=parse)
    (message,), _ = await env.reset(seed=1)
    assert message["content"] == "Play.\n\nAt 0."
    assert "say go" in (await env.step(say("stay")))[0][0]["content"]
    assert "outside of Discrete(4)" in (await env.step(say("go far")))[0][0]["content"]
    observation, *_ = await env.step(say("go"))
    assert observation[0]["content"].startswith("At ")
    named = GymnasiumEnvironment("FrozenLake-v1", action_names=["w", "s", "e", "n"], observe="space")
    (message,), _ = await named.reset(seed=1)
    assert "one of: w, s, e, n" in message["content"] and message["content"].endswith("\n\n0")


@each
async def test_seeds_rewards_and_ends_pass_through_unchanged(name: str) -> None:
    plain = gymnasium.make(newest(name))
    env = GymnasiumEnvironment(newest(name), observe="space")
    rng = np.random.default_rng(0)
    for seed in range(3):
        _, info = plain.reset(seed=seed)
        _, ours = await env.reset(seed=seed)
        assert_equal(ours["gymnasium"], info)
        for _ in range(30):
            action = int(rng.integers(plain.action_space.n))  # type: ignore[attr-defined]
            _, reward, terminated, truncated, info = plain.step(action)
            _, *rest, ours = await env.step(say(f"<action>{GAMES[name].actions[action]}</action>"))
            assert rest == [reward, terminated, truncated]
            assert_equal(ours["gymnasium"], info)
            if terminated or truncated:
                with pytest.raises(RuntimeError, match="after the episode's end"):
                    await env.step(say("0"))
                break
    await env.close()


def assert_equal(left: Any, right: Any) -> None:
    assert {key: np.asarray(one).tolist() for key, one in left.items()} == {
        key: np.asarray(one).tolist() for key, one in right.items()
    }


async def test_gymnasiums_own_time_limit_and_ours_truncate() -> None:
    for kwargs in ({"max_episode_steps": 2}, {"max_steps": 2}):
        env = GymnasiumEnvironment(newest("CliffWalking"), **kwargs)  # type: ignore[arg-type]
        await env.reset(seed=1)
        assert (await env.step(say("up")))[2:4] == (False, False)
        assert (await env.step(say("up")))[2:4] == (False, True)


async def test_a_wrong_answer_is_answered_counted_and_never_a_step() -> None:
    env = GymnasiumEnvironment("FrozenLake-v1", max_invalid=3, invalid_reward=-0.1, is_slippery=False)
    await env.reset(seed=1)
    observation, reward, terminated, truncated, info = await env.step(say("hmm, jump"))
    assert "left, down, right, up" in observation[0]["content"] and "<action>" in observation[0]["content"]
    assert (reward, terminated, truncated) == (-0.1, False, False)
    assert info["metrics"] == {"steps": 0.0, "invalid_actions": 1.0}
    assert (await env.step({"role": "assistant", "content": None}))[3] is False
    observation, reward, *_ = await env.step({"role": "assistant", "content": [{"type": "text", "text": "down"}]})
    assert reward == 0 and "[F]HFH" in observation[0]["content"]
    *_, truncated, info = await env.step(say("9"))
    assert truncated and info["metrics"] == {"steps": 1.0, "invalid_actions": 3.0}
    with pytest.raises(RuntimeError):
        await env.step(say("down"))
    patient = GymnasiumEnvironment("FrozenLake-v1", max_invalid=None)
    await patient.reset(seed=1)
    assert not any([(await patient.step(say("?")))[3] for _ in range(20)])


async def test_a_tasks_seed_goes_before_that_of_reset_and_other_keys_are_options(slow: Any) -> None:
    env = GymnasiumEnvironment(Slow)
    _, info = await env.reset(seed=5, options={"seed": 3, "level": 2})
    assert info["gymnasium"] == {"seed": 3, "options": {"level": 2}}
    _, info = await env.reset(seed=5)
    assert info["gymnasium"] == {"seed": 5, "options": None}
    for wrong in (-1, "3", True, None):
        with pytest.raises(ValueError, match="whole number of at least 0 as seed"):
            await env.reset(options={"seed": wrong})
    assert slow.made == 1


def test_its_own_tasks_are_seeds_and_the_test_ones_are_held_out() -> None:
    env = TimeLimit(GymnasiumEnvironment("FrozenLake-v1"), 9)
    train, test = (env.own_tasks(split) for split in ("train", "test"))
    assert train[:2] == [{"seed": 0}, {"seed": 1}] and test[0] == {"seed": 1_000_000}
    assert not {task["seed"] for task in train} & {task["seed"] for task in test}


def test_what_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(LookupError, match="FrozenLak-v1"):
        GymnasiumEnvironment("FrozenLak-v1")
    with pytest.raises(TypeError, match=r"FrozenLake-v1 with arguments .*slippery"):
        GymnasiumEnvironment("FrozenLake-v1", slippery=True)
    with pytest.raises(TypeError, match="is_slippery"):
        GymnasiumEnvironment(gymnasium.make("FrozenLake-v1"), is_slippery=True)
    with pytest.raises(TypeError, match="wants an id, an environment or a function"):
        GymnasiumEnvironment(3)  # type: ignore[arg-type]
    for wrong in ({"run_in": "process"}, {"observe": "image"}, {"max_steps": 0}, {"step_timeout": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GymnasiumEnvironment("FrozenLake-v1", **wrong)


async def test_what_cannot_be_told_is_an_error_of_reset() -> None:
    class Image(Slow):
        observation_space = spaces.Box(0, 255, (96, 96, 3), dtype=np.uint8)

    with pytest.raises(UnsupportedSpaceError, match="27648 numbers"):
        await GymnasiumEnvironment(Image).reset()
    with pytest.raises(ValueError, match="want 3 names"):
        await GymnasiumEnvironment(Slow, action_names=["a"]).reset()
    with pytest.raises(ValueError, match="render_mode='ansi'"):
        await GymnasiumEnvironment(Slow, observe="render").reset()
    with pytest.raises(TypeError, match=r"no gymnasium\.Env"):
        await GymnasiumEnvironment(dict).reset()  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["FrozenLake-v1", "gymnasium:FrozenLake-v1", "object", "function"])
async def test_ids_objects_and_functions_are_read(source: str) -> None:
    made = {"object": gymnasium.make("FrozenLake-v1"), "function": lambda: gymnasium.make("FrozenLake-v1")}
    env = GymnasiumEnvironment(made.get(source, source))  # type: ignore[arg-type]
    (message,), _ = await env.reset(seed=1)
    assert "left, down, right, up" in message["content"]
    await env.close()
    await env.close()
    if source == "object":
        with pytest.raises(RuntimeError, match="given as an object"):
            await env.reset()
    else:
        await env.reset()
        await env.close()


async def test_it_can_be_pickled_in_the_middle_of_an_episode() -> None:
    env = GymnasiumEnvironment("FrozenLake-v1")
    first = await env.reset(seed=3)
    other = pickle.loads(pickle.dumps(env))
    with pytest.raises(RuntimeError, match="before reset"):
        await other.step(say("left"))
    assert await other.reset(seed=3) == first
    await env.step(say("left"))


async def test_taxi_and_blackjack_in_words() -> None:
    env = GymnasiumEnvironment(newest("Taxi"))
    plain = gymnasium.make(newest("Taxi"))
    for seed in range(5):
        (message,), _ = await env.reset(seed=seed)
        state, _ = plain.reset(seed=seed)
        row, column, passenger, goal = plain.unwrapped.decode(state)  # type: ignore[attr-defined]
        assert f"Taxi at row {row}, column {column}." in message["content"]
        at = plain.unwrapped.locs  # type: ignore[attr-defined]
        assert (
            f"Passenger at {'RGYB'[passenger]} (row {at[passenger][0]}, column {at[passenger][1]})."
            in (message["content"])
        )
        assert f"Destination: {'RGYB'[goal]} (row {at[goal][0]}, column {at[goal][1]})." in message["content"]
        assert "+---------+" in message["content"]
    table = GymnasiumEnvironment(newest("Blackjack"))
    (message,), _ = await table.reset(seed=3)
    (total, _, ace), _ = gymnasium.make(newest("Blackjack")).reset(seed=3)
    assert f"add up to {total}, with{'' if ace else 'out'} a usable ace" in message["content"]
    assert "one of: stick, hit" in message["content"]


@pytest.mark.parametrize("name", GAMES)
def test_known_games_have_a_name_for_each_action(name: str) -> None:
    env = gymnasium.make(newest(name))
    assert env.action_space == spaces.Discrete(len(GAMES[name].actions))


def test_colours_become_brackets() -> None:
    assert without_colours("S\x1b[41mF\x1b[0mF\x1b[2J") == "S[F]F"
