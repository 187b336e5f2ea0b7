"""Tests advantages against published values, and that they depend only on the group key."""

import itertools
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.recipe import TrainerConfig
from agentrl.train.advantages import (
    gae,
    group,
    group_advantages,
    leave_one_out,
    reward,
    token_credit,
    turns,
    whitened,
)
from agentrl.train.returns import Scored, Turn, returns_to_go


def test_group_mean_and_unbiased_std_match_the_published_values() -> None:
    assert group_advantages([1, 0, 0, 0], ["a"] * 4, epsilon=0) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_without_std_only_the_mean_is_taken_off() -> None:
    assert group_advantages([1, 0, 0, 0], ["a"] * 4, scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_divided_by_the_mean_a_rare_success_weighs_most() -> None:
    rewards, groups = [1, 0, 0, 0, 1, 1, 1, 0], ["hard"] * 4 + ["easy"] * 4
    assert group_advantages(rewards, groups, scale="mean") == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])


def test_dividing_by_the_mean_of_negative_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rewards=mean"):
        group_advantages([1.0, -2.0], ["a", "a"], scale="mean")


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, 1.0], [3.0], [0.1 + 0.2, 0.1 + 0.2]])
def test_a_group_without_spread_or_of_one_gives_zero(rewards: list[float]) -> None:
    assert group_advantages(rewards, ["a"] * len(rewards), epsilon=0) == [0.0] * len(rewards)


def test_groups_of_different_sizes_in_one_shuffled_batch_are_each_right() -> None:
    groups = {("a", "x"): [1.0, 0.0, 0.0, 0.0], ("b", "x"): [2.0, 0.0, 1.0], ("a", "y"): [5.0]}
    alone = {
        (key, index): value
        for key, rewards in groups.items()
        for index, value in enumerate(group_advantages(rewards, [key] * len(rewards)))
    }
    entries = [(key, index, reward) for key, rewards in groups.items() for index, reward in enumerate(rewards)]
    random.Random(3).shuffle(entries)
    mixed = group_advantages([e[2] for e in entries], [e[0] for e in entries])
    for (key, index, _), value in zip(entries, mixed, strict=True):
        assert value == alone[key, index]


def scored(rewards: list[float], groups: list[str]) -> list[Scored]:
    return [
        Scored((group, "x"), reward, (Turn(None, 1, reward),), True)
        for reward, group in zip(rewards, groups, strict=True)
    ]


def test_leave_one_out_is_the_published_one_and_an_episode_alone_gets_zero() -> None:
    config = TrainerConfig(preset="rloo")
    assert leave_one_out(scored([1, 0, 0, 0], ["a"] * 4), config) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    mixed = leave_one_out(scored([1, 5, 0, 3, 3], ["a", "b", "a", "c", "c"]), config)
    assert mixed == pytest.approx([1, 0, -1, 0, 0])


def test_the_deviation_of_the_batch_is_that_of_all_rewards() -> None:
    rewards, groups = [1.0, 0.0, 2.0, 2.0], ["a", "a", "b", "b"]
    deviation = statistics.stdev(rewards)
    found = group_advantages(rewards, groups, scale="batch", epsilon=0)
    assert found == pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0])
    config = TrainerConfig(advantage="reward", scale_rewards="batch")
    assert reward(scored(rewards, groups), config) == pytest.approx([r / deviation for r in rewards], rel=1e-5)
    for alike in ([1.0], [1.0] * 4, [-0.5, -0.5]):  # no deviation to divide by
        assert reward(scored(alike, groups[: len(alike)]), config) == [0.0] * len(alike)


def test_whitening_is_the_published_one_and_values_alike_give_zero() -> None:
    assert whitened(np.array([1.0, 1.0, 2.0]), epsilon=0).tolist() == pytest.approx(
        [-0.57735, -0.57735, 1.1547], abs=1e-5
    )
    assert whitened(np.full(7, 3.0)).tolist() == [0.0] * 7
    assert whitened(np.array([3.0])).tolist() == [0.0]


def line(values: list[list[float]], *, after: float = 0.0, reward: float = 1.0) -> Scored:
    """Makes an episode without forks; its reward comes at the end."""
    made = [
        Turn(number - 1 if number else None, len(v), None, tuple(v), after if number == len(values) - 1 else 0.0)
        for number, v in enumerate(values)
    ]
    return Scored(("g", "x"), reward, tuple(made), not after)


PUBLISHED = [  # what the tests' reference gives for V = .1, .2, .3, .4, .5, gamma .9, lambda .8, and reward 1
    (line([[0.2, 0.3, 0.4]]), [0.42424, 0.492, 0.6]),
    (line([[0.2, 0.3, 0.4]], after=0.5), [0.65752, 0.816, 1.05]),
    (line([[0.1], [0.4]]), [0.692, 0.6]),  # what a tool said between them is passed over
    (line([[0.1, 0.2]]), [0.656, 0.8]),  # a tool's answer comes last: the reward is not lost
]


@pytest.mark.parametrize(("one", "expected"), PUBLISHED)
def test_gae_is_the_published_one(one: Scored, expected: list[float]) -> None:
    config = TrainerConfig(preset="ppo", discount=0.9, gae_lambda=0.8)
    found = [value for turn in gae([one, line([[9.0]])], config)[0] for value in turn]
    assert found == pytest.approx(expected, abs=1e-5)


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    discount=st.sampled_from([0.5, 0.9, 1.0]),
    decay=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_gae_is_the_sum_of_discounted_errors(lengths: list[int], seed: int, discount: float, decay: float) -> None:
    """Compares with the definition, summed term by term; every turn has a step reward."""
    rng = random.Random(seed)
    values = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    earned = [rng.gauss(0, 1) for _ in lengths]
    made = [Turn(i - 1 if i else None, n, earned[i], tuple(values[i])) for i, n in enumerate(lengths)]
    one = Scored(("g", "x"), sum(earned), tuple(made), True)
    config = TrainerConfig(preset="ppo", discount=discount, gae_lambda=decay)
    flat = [v for turn in values for v in turn]
    ends = list(itertools.accumulate(lengths))
    rewards = [earned[ends.index(t + 1)] if t + 1 in ends else 0.0 for t in range(len(flat))]
    errors = [rewards[t] + discount * (flat[t + 1] if t + 1 < len(flat) else 0.0) - flat[t] for t in range(len(flat))]
    expected = [sum((discount * decay) ** (k - t) * errors[k] for k in range(t, len(flat))) for t in range(len(flat))]
    assert [v for turn in gae([one], config)[0] for v in turn] == pytest.approx(expected, abs=1e-9)


def test_gae_without_a_critic_says_so() -> None:
    with pytest.raises(ValueError, match="needs a critic"):
        gae([Scored(("g", "x"), 1.0, (Turn(None, 2),), True)], TrainerConfig(preset="ppo"))


FORK = (Turn(None, 1, 1.0), Turn(0, 1, 2.0), Turn(0, 1, 6.0), Turn(2, 1, None))


def test_returns_follow_the_branch_that_earned_them_and_a_fork_takes_their_mean() -> None:
    one = Scored(("g", "x"), 10.0, FORK, True)  # 9 in steps: the rest comes at the end of both branches
    assert one.rewards() == [1.0, 3.0, 6.0, 1.0]
    assert returns_to_go(one, 0.5) == [1 + 0.5 * (3 + 6.5) / 2, 3.0, 6 + 0.5, 1.0]
    valued = Scored(("g", "x"), 10.0, tuple(replace(turn, values=(0.5,)) for turn in FORK), True)
    found = gae([valued], TrainerConfig(preset="ppo"))[0]  # discount and lambda 1: returns less the value
    assert found == [[pytest.approx(value - 0.5)] for value in returns_to_go(one, 1.0)]


def test_turns_of_one_step_are_groups_and_turns_of_a_group_have_one_baseline() -> None:
    single = scored([1, 0, 0, 3], ["a", "a", "a", "b"])
    assert [v[0] for v in turns(single, TrainerConfig(advantage="turns"))] == group(single, TrainerConfig())
    made = [
        Scored(("g", "x"), 1.0, (Turn(None, 2, 0.0), Turn(0, 1, 1.0)), True),
        Scored(("g", "x"), 0.5, (Turn(None, 3, 0.5),), True),
    ]
    config = TrainerConfig(advantage="turns", discount=0.5, scale_rewards="none")
    mean = (0.5 + 1.0 + 0.5) / 3
    found = turns(made, config)
    assert found == [[pytest.approx(0.5 - mean), pytest.approx(1 - mean)], [pytest.approx(0.5 - mean)]]
    assert token_credit(found[0], made[0]).tolist() == [found[0][0]] * 2 + [found[0][1]]
    assert turns(made[:1], config) == [[0.0, 0.0]], "nothing to compare an episode alone with"
