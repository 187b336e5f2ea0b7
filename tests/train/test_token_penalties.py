"""Tests KL penalties at their tokens against returns that are summed term by term in float64."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.recipe import TrainerConfig
from agentrl.train.advantages import gae, group_advantages, reward, token_credit, turns, whitened
from agentrl.train.returns import Scored, Turn
from tests.train.test_batch import episode, make_train_batch, trained

lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def made_line(lengths: list[int], rng: random.Random, group: str = "g") -> Scored:
    """Makes an episode without forks: a step reward, values and penalties in each turn, and a reward at the end."""
    made = [
        Turn(
            index - 1 if index else None, n, rng.gauss(0, 1), tuple(rng.gauss(0, 1) for _ in range(n)),
            penalties=tuple(rng.gauss(0, 0.3) for _ in range(n)),
        )
        for index, n in enumerate(lengths)
    ]  # fmt: skip
    return Scored((group, "x"), sum(t.reward or 0.0 for t in made) + rng.gauss(0, 1), tuple(made), True)


def flat(credit: Any, one: Scored) -> list[float]:
    return token_credit(credit, one).tolist()


def penalties_of(one: Scored) -> list[float]:
    return [penalty for turn in one.turns for penalty in turn.penalties]


@settings(deadline=None)
@given(lengths, st.integers(0, 1000), st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_feels_a_penalty_at_its_token(lengths: list[int], seed: int, gamma: float, decay: float) -> None:
    one = made_line(lengths, random.Random(seed))
    values, costs = [v for turn in one.turns for v in turn.values], penalties_of(one)
    ends = list(itertools.accumulate(lengths))
    rest = one.reward - sum(turn.reward or 0.0 for turn in one.turns)
    errors = []
    for t, value in enumerate(values):
        earned = (one.turns[ends.index(t + 1)].reward or 0.0) if t + 1 in ends else 0.0
        earned += rest if t + 1 == len(values) else 0.0
        errors.append(earned - costs[t] + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - value)
    expected = [sum((gamma * decay) ** (k - t) * errors[k] for k in range(t, len(values))) for t in range(len(values))]
    config = TrainerConfig(preset="ppo", discount=gamma, gae_lambda=decay)
    assert flat(gae([one], config)[0], one) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(lengths, st.integers(0, 1000))
def test_reinforce_subtracts_the_penalties_from_a_token_on(lengths: list[int], seed: int) -> None:
    one = made_line(lengths, random.Random(seed))
    costs = penalties_of(one)
    expected = [one.reward - sum(costs[t:]) for t in range(len(costs))]
    assert flat(reward([one], TrainerConfig(preset="reinforce_pp"))[0], one) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(lengths, lengths, st.integers(0, 1000), st.sampled_from([0.5, 1.0]), st.sampled_from(["none", "group", "batch"]))
def test_turns_subtract_the_penalties_from_a_token_on(
    first: list[int], second: list[int], seed: int, gamma: float, scale: str
) -> None:
    """The baseline is the mean return of the group's turns, each from its first token."""
    rng = random.Random(seed)
    group = [made_line(first, rng), made_line(second, rng)]

    def returns(one: Scored) -> list[list[float]]:
        """The return of each token of each turn."""
        later, found = 0.0, []
        rest = one.reward - sum(turn.reward or 0.0 for turn in one.turns)
        for turn in reversed(one.turns):
            end = (turn.reward or 0.0) + gamma * later + rest
            rest = 0.0
            found.append([end - sum(turn.penalties[t:]) for t in range(turn.tokens)])
            later = found[-1][0]
        return found[::-1]

    of_turns = [turn[0] for one in group for turn in returns(one)]
    mean, deviation = np.mean(of_turns), np.std(of_turns, ddof=1)
    divisor = 1.0 if scale == "none" else deviation + 1e-6
    config = TrainerConfig.model_validate({"advantage": "turns", "discount": gamma, "scale_rewards": scale})
    for credit, one in zip(turns(group, config), group, strict=True):
        expected = [(value - mean) / divisor for turn in returns(one) for value in turn]
        assert flat(credit, one) == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(lengths, st.integers(0, 1000))
def test_without_penalties_nothing_changes(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    group = [made_line(lengths, rng), made_line(lengths[::-1], rng)]
    bare = [replace(one, turns=tuple(replace(turn, penalties=()) for turn in one.turns)) for one in group]
    zero = [
        replace(one, turns=tuple(replace(turn, penalties=(0.0,) * turn.tokens) for turn in one.turns)) for one in group
    ]
    for function, choices in (
        (gae, {"preset": "ppo"}), (reward, {"preset": "reinforce_pp"}), (turns, {"advantage": "turns"}),
    ):  # fmt: skip
        config = TrainerConfig.model_validate(choices)
        for without, nothing, one in zip(function(bare, config), function(zero, config), group, strict=True):
            assert flat(without, one) == flat(nothing, one), function
    assert reward(bare, TrainerConfig(preset="reinforce_pp")) == [one.reward for one in bare]


def test_a_fork_takes_the_mean_of_its_branches_penalties() -> None:
    made = (
        Turn(None, 2, None, (0.0, 0.0), penalties=(0.1, 0.2)),
        Turn(0, 1, None, (0.0,), penalties=(0.4,)),
        Turn(0, 2, None, (0.0, 0.0), penalties=(0.8, 1.6)),
    )
    one = Scored(("g", "x"), 1.0, made, True)
    branches = (0.4 + 2.4) / 2
    expected = [1 - 0.3 - branches, 1 - 0.2 - branches, 1 - 0.4, 1 - 2.4, 1 - 1.6]
    assert flat(reward([one], TrainerConfig(preset="reinforce_pp"))[0], one) == pytest.approx(expected)
    assert flat(gae([one], TrainerConfig(preset="ppo"))[0], one) == pytest.approx(expected)


def test_turns_with_equal_returns_have_no_advantage_whatever_their_penalties() -> None:
    """A group's deviation of 0 must not blow the penalties up."""
    alike = Scored(("g", "x"), 1.0, (Turn(None, 2, penalties=(0.1, 0.2)),), True)
    config = TrainerConfig(advantage="turns")
    assert [flat(credit, alike) for credit in turns([alike, alike], config)] == [[0.0, 0.0]] * 2
    assert turns([alike], config) == [[0.0]], "nothing to compare an episode alone with"


def test_the_first_token_of_a_single_turn_has_the_groups_advantage_of_the_whole_sum() -> None:
    rng = random.Random(2)
    group, config = [made_line([3], rng) for _ in range(4)], TrainerConfig(advantage="turns")
    found = [flat(credit, one)[0] for credit, one in zip(turns(group, config), group, strict=True)]
    whole = [one.reward - sum(penalties_of(one)) for one in group]
    assert found == pytest.approx(group_advantages(whole, ["g"] * 4))


def test_a_batch_hands_each_token_its_penalty() -> None:
    episodes = [episode("g", 1.0, [5, 5, 5]), episode("h", 0.0, [6, 6])]
    penalties = np.array([0.1, 0.2, 0.3, -0.1, 0.4])
    config = TrainerConfig(preset="reinforce_pp", kl_coef=0.1, kl_in="reward")
    batch = make_train_batch(episodes, config, penalties=penalties)
    found = [value for branch in batch.branches for value in trained(batch, branch)]
    expected = whitened(np.array([1 - 0.6, 1 - 0.5, 1 - 0.3, -0.3, -0.4]))
    assert found == pytest.approx(expected.tolist(), abs=1e-6)
    ppo = TrainerConfig(preset="ppo", kl_coef=0.1, kl_in="reward", whiten="none")
    batch = make_train_batch(episodes, ppo, penalties=penalties, values=np.zeros(7))
    for column in ("advantages", "returns"):  # the critic learns what the policy is paid
        found = [value for branch in batch.branches for value in trained(batch, branch, column)]
        assert found == pytest.approx([0.4, 0.5, 0.7, -0.3, -0.4], abs=1e-6)
