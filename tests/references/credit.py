"""Reference advantages: Python floats, one double loop a formula, nothing shared with agentrl.

Every function takes the :class:`Entry` of each role of each episode, and returns a list of numbers for each entry: one
number for each sampled token, in the order of time.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

EPSILON = 1e-6  # what docs and docstrings say is added to a standard deviation

Credit = Callable[[list["Entry"]], list[list[float]]]


@dataclass
class Turn:
    """A sampled message.

    Attributes:
        reward: Its reward, the episode's rest included.
        values: The critic's value before each of its tokens.
        followers: Numbers of the turns that follow it; several at a fork.
    """

    reward: float
    values: list[float]
    followers: list[int]


@dataclass
class Entry:
    """One role of one episode.

    Attributes:
        group: Key of the episodes that are compared: task's group and role.
        reward: The role's reward.
        turns: Sampled messages in the order of time, whatever their branch.
        after: The critic's value of the end where the episode was cut, else 0.
    """

    group: tuple[str, str]
    reward: float
    turns: list[Turn]
    after: float

    @property
    def tokens(self) -> int:
        return sum(len(turn.values) for turn in self.turns)


def group_relative(divisor: str) -> Credit:
    """Reward minus the group's mean, divided: GRPO (``group``), LitePPO (``batch``), MaxRL (``mean``), Dr. GRPO."""

    def credit(entries: list[Entry]) -> list[list[float]]:
        values = centered([[one.reward] for one in entries], entries, divisor)
        return [[value] * one.tokens for (value,), one in zip(values, entries, strict=True)]

    return credit


def centered(numbers: list[list[float]], entries: list[Entry], divisor: str) -> list[list[float]]:
    """Takes the mean over the group's numbers off each number, and divides; 0 in a group of one episode."""
    every = [value for of_one in numbers for value in of_one]
    found = []
    for own, one in zip(numbers, entries, strict=True):
        members = [of_one for of_one, other in zip(numbers, entries, strict=True) if other.group == one.group]
        group = [value for of_one in members for value in of_one]
        if len(members) < 2 or max(group) == min(group):
            found.append([0.0] * len(own))
            continue
        mean = statistics.fmean(group)
        by = {"none": 1.0, "mean": mean}.get(divisor) or statistics.stdev(group if divisor == "group" else every)
        if divisor in ("group", "batch"):
            by += EPSILON
        found.append([(value - mean) / by for value in own])
    return found


def leave_one_out(entries: list[Entry]) -> list[list[float]]:
    """Reward minus the mean reward of the group's others (Ahmadian et al. 2024, eq. 7); 0 for an only episode."""
    found = []
    for number, one in enumerate(entries):
        others = [o.reward for n, o in enumerate(entries) if o.group == one.group and n != number]
        found.append([one.reward - statistics.fmean(others) if others else 0.0] * one.tokens)
    return found


def plain_reward(entries: list[Entry]) -> list[list[float]]:
    """The reward itself (Williams 1992)."""
    return [[one.reward] * one.tokens for one in entries]


def reward_over_deviation(entries: list[Entry]) -> list[list[float]]:
    """The reward divided by the standard deviation over the batch."""
    deviation = statistics.stdev(one.reward for one in entries) + EPSILON
    return [[one.reward / deviation] * one.tokens for one in entries]


def nothing(entries: list[Entry]) -> list[list[float]]:
    """No credit from rewards (distillation)."""
    return [[0.0] * one.tokens for one in entries]


def returns_of_turns(discount: float, divisor: str) -> Credit:
    """Return of each turn minus the mean return of the group's turns."""

    def from_turn(one: Entry, now: int) -> float:
        turn = one.turns[now]
        return turn.reward + discount * _mean([from_turn(one, later) for later in turn.followers])

    def credit(entries: list[Entry]) -> list[list[float]]:
        returns = [[from_turn(one, now) for now in range(len(one.turns))] for one in entries]
        values = centered(returns, entries, divisor)
        return [
            [value for value, turn in zip(own, one.turns, strict=True) for _ in turn.values]
            for own, one in zip(values, entries, strict=True)
        ]

    return credit


def generalised(discount: float, decay: float) -> Credit:
    """Generalised advantage estimates of each sampled token (Schulman et al. 2016, eq. 16), token by token."""

    def at(one: Entry, turn: int, token: int) -> float:
        """Returns the estimate of a token from those of the tokens that come next."""
        own = one.turns[turn]
        last = token + 1 == len(own.values)
        following = [(later, 0) for later in own.followers] if last else [(turn, token + 1)]
        end = one.after if turn == len(one.turns) - 1 else 0.0
        value = _mean([one.turns[t].values[place] for t, place in following]) if following else end
        error = own.reward * last + discount * value - own.values[token]
        return error + discount * decay * _mean([at(one, t, place) for t, place in following])

    def of_one(one: Entry) -> list[float]:
        return [at(one, turn, token) for turn in range(len(one.turns)) for token in range(len(one.turns[turn].values))]

    return lambda entries: [of_one(one) for one in entries]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def whitened(values: list[float]) -> list[float]:
    """Mean 0 and unbiased standard deviation 1 over the batch's tokens (REINFORCE++); zeros where all are equal."""
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean, deviation = statistics.fmean(values), statistics.stdev(values) + EPSILON
    return [(value - mean) / deviation for value in values]
