"""Tests that returns follow a role's turns in time, also over several conversations and forks."""

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.recipe import TrainerConfig
from agentrl.train.advantages import gae, turns
from agentrl.train.returns import Scored, Turn, returns_to_go
from agentrl.train.turn_order import TurnOrder, followers

SETTINGS = {"discount": st.sampled_from([0.5, 0.9, 1.0]), "decay": st.sampled_from([0.0, 0.7, 1.0])}


def scored(made: list[Turn], reward: float | None = None, *, terminated: bool = True) -> Scored:
    total = sum(turn.reward or 0.0 for turn in made)
    return Scored(("g", "x"), total if reward is None else reward, tuple(made), terminated)


def conversations(rewards: list[float | None]) -> list[Turn]:
    """Makes an episode whose turns each begin a conversation, as ``inference.history=branch`` does."""
    return [Turn(None, 1, reward, root=number) for number, reward in enumerate(rewards)]


def test_a_reward_at_the_end_counts_for_the_turns_of_earlier_conversations() -> None:
    one = scored(conversations([0.0, 0.0, 1.0]))
    assert returns_to_go(one, 1.0) == [1.0, 1.0, 1.0]
    assert returns_to_go(one, 0.5) == [0.25, 0.5, 1.0]
    judged = scored(conversations([None, None, None]), 1.0)
    assert judged.rewards() == [0.0, 0.0, 1.0], "no step gave it: it comes at the end, once"
    valued = scored([Turn(None, 1, r, (0.0,), root=n) for n, r in enumerate([0.0, 0.0, 1.0])])
    assert gae([valued], TrainerConfig(preset="ppo"))[0] == [[1.0], [1.0], [1.0]]
    other = scored(conversations([0.0, 0.0, 0.0]))
    config = TrainerConfig(advantage="turns", scale_rewards="none")
    assert turns([one, other], config) == [[0.5] * 3, [-0.5] * 3]


SHAPES = {
    "a line": ([None, 0, 1], [0, 0, 0], [[1], [2], []]),
    "a fork": ([None, 0, 0, 2], [0, 0, 0, 0], [[1, 2], [], [3], []]),
    "two samples of the first call": ([None, None, 0], [0, 0, 0], [[2], [], []]),
    "a conversation for each turn": ([None, None, None], [0, 1, 2], [[1], [2], []]),
    "two samples for each of two conversations": ([None, None, None, None], [0, 0, 1, 1], [[2, 3], [2, 3], [], []]),
    "both branches of a fork act before the next": ([None, 0, 0, 1, 2, None], [0] * 5 + [5], [
        [1, 2], [3], [4], [5], [5], [],
    ]),
    "a conversation in between": ([None, None, 0], [0, 1, 0], [[1], [2], []]),
    "two conversations by turns": ([None, None, 0, 1], [0, 1, 0, 1], [[1], [2], [3], []]),
    "back to an older one, two samples there": ([None, None, 0, 0], [0, 1, 0, 0], [[1], [2, 3], [], []]),
    "a return to an earlier message after another conversation": ([None, 0, None, 0], [0, 0, 1, 0], [
        [1, 3], [2], [3], [],
    ]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_follows_a_turn(shape: str) -> None:
    parents, roots, expected = SHAPES[shape]
    assert followers(parents, roots) == expected


@st.composite
def histories(draw: st.DrawFn, forks: bool) -> tuple[list[int | None], list[int]]:
    """Draws parents and roots of turns in time: each goes on in a conversation, forks one, or begins one."""
    parents: list[int | None] = []
    roots: list[int] = []
    for number in range(draw(st.integers(1, 9))):
        root = draw(st.sampled_from([*sorted(set(roots)), number]))
        own = [index for index, known in enumerate(roots) if known == root]
        parent: int | None = own[-1] if own else None
        if own and forks:
            parent = draw(st.sampled_from([None, *own]))
        parents.append(parent)
        roots.append(root)
    return parents, roots


def made(parents: list[int | None], roots: list[int], seed: int) -> list[Turn]:
    rng = random.Random(seed)
    found = []
    for parent, root in zip(parents, roots, strict=True):
        tokens = rng.randint(1, 3)
        reward = rng.choice([None, rng.gauss(0, 1)])
        found.append(Turn(parent, tokens, reward, tuple(rng.gauss(0, 1) for _ in range(tokens)), root=root))
    return found


def after(index: int, parents: list[int | None], roots: list[int]) -> list[int]:
    """The definition, step by step in time: go on to the first turn that is a child, or of another conversation."""
    for later in range(index + 1, len(parents)):
        if parents[later] == index or roots[later] != roots[index]:
            same = (parents[later], roots[later])
            return [one for one in range(later, len(parents)) if (parents[one], roots[one]) == same]
    return []


@given(history=histories(forks=True), seed=st.integers(0, 999), **SETTINGS)
def test_returns_and_gae_are_those_of_the_definition(
    history: tuple[list[int | None], list[int]], seed: int, discount: float, decay: float
) -> None:
    """Compares with a recursion forward in time, in float64, that knows nothing of the one in the trainer."""
    parents, roots = history
    one = scored(made(parents, roots, seed), 0.25)
    earned = np.array([turn.reward or 0.0 for turn in one.turns])
    ends = [not after(index, parents, roots) for index in range(len(parents))]
    earned = earned + (0.25 - earned.sum()) * np.array(ends)

    @cache
    def value_of(index: int) -> np.float64:
        return earned[index] + discount * np.mean([value_of(n) for n in after(index, parents, roots)] or [0.0])

    assert returns_to_go(one, discount) == pytest.approx([value_of(n) for n in range(len(parents))], abs=1e-12)

    @cache
    def estimate(index: int, token: int) -> np.float64:
        turn, last = one.turns[index], token == one.turns[index].tokens - 1
        nexts = after(index, parents, roots) if last else []
        value = np.mean([one.turns[n].values[0] for n in nexts] or [0.0]) if last else turn.values[token + 1]
        carried = np.mean([estimate(n, 0) for n in nexts] or [0.0]) if last else estimate(index, token + 1)
        error = (earned[index] if last else 0.0) + discount * value - turn.values[token]
        return error + discount * decay * carried

    found = gae([one], TrainerConfig(preset="ppo", discount=discount, gae_lambda=decay))[0]
    for index, of_turn in enumerate(found):
        assert of_turn == pytest.approx([estimate(index, token) for token in range(len(of_turn))], abs=1e-12)


@given(history=histories(forks=False), seed=st.integers(0, 999), **SETTINGS)
def test_without_forks_it_does_not_matter_how_turns_are_spread_over_conversations(
    history: tuple[list[int | None], list[int]], seed: int, discount: float, decay: float
) -> None:
    parents, roots = history
    spread = made(parents, roots, seed)
    line = made([n - 1 if n else None for n in range(len(parents))], [0] * len(parents), seed)
    config = TrainerConfig(preset="ppo", discount=discount, gae_lambda=decay)
    assert returns_to_go(scored(spread, 2.0), discount) == returns_to_go(scored(line, 2.0), discount)
    assert gae([scored(spread, 2.0)], config) == gae([scored(line, 2.0)], config)


@given(history=histories(forks=True))
def test_what_follows_comes_later_and_one_conversation_is_its_tree(
    history: tuple[list[int | None], list[int]],
) -> None:
    parents, roots = history
    for index, nexts in enumerate(followers(parents, roots)):
        assert nexts == sorted(set(nexts)) and all(one > index for one in nexts)
    one_root = followers(parents, [0] * len(parents))
    assert one_root == [[n for n, p in enumerate(parents) if p == index] for index in range(len(parents))]


def test_turns_are_found_among_messages_that_were_not_sampled() -> None:
    parents = np.array([-1, 0, 1, 2, 1, -1, 5, 6])
    sampled = np.array([False, True, False, True, True, False, False, True])
    order = TurnOrder.of(parents, sampled, first=10)
    assert (order.messages, order.parents, order.roots) == ([11, 13, 14, 17], [None, 0, 0, None], [0, 0, 0, 5])
    assert followers(order.parents, order.roots) == [[1, 2], [3], [3], []]


def test_a_conversation_that_goes_on_from_a_known_answer_is_part_of_that_ones_conversation() -> None:
    """Two samples of a call; the second conversation goes on from the second of them, the third from an unknown one."""
    parents = np.array([-1, 0, 0, -1, 3, -1, 5])
    sampled = np.array([False, True, True, False, True, False, True])
    follows = np.array([-1, -1, -1, 2, -1, -1, -1])
    order = TurnOrder.of(parents, sampled, follows=follows)
    assert (order.parents, order.roots) == ([None, None, 1, None], [0, 0, 0, 5])
    assert followers(order.parents, order.roots) == [[3], [2], [3], []]
    unknown = TurnOrder.of(parents, sampled)
    assert followers(unknown.parents, unknown.roots) == [[2], [2], [3], []]
