"""Advantages against published values, and their dependence on group identity alone."""

import random
import statistics

import pytest

from agentrl.config.recipe import TrainerConfig
from agentrl.train.advantages import Scored, group_advantages, leave_one_out, reward, whitened


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
    return [Scored((group, "x"), reward, (reward,), True) for reward, group in zip(rewards, groups, strict=True)]


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


def test_whitening_weighs_entries_by_their_tokens() -> None:
    assert whitened([1.0, 2.0], [2, 1], epsilon=0) == pytest.approx([-0.57735, 1.1547], abs=1e-5)
    assert whitened([3.0, 3.0], [2, 5], epsilon=0) == [0.0, 0.0]
    assert whitened([3.0], [1]) == [0.0]
