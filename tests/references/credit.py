"""Reference advantages: Python floats, one double loop a formula, nothing shared with agentrl.

Every function takes the :class:`Entry` of each role of each episode, and returns a list of numbers for each entry: one
number for each sampled token, in the order of time.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

EPSILON = 1e-6  # what docs and docstrings say is added to a standard deviation

Credit = Callable[[list["Entry"]], list[list[float]]]


@dataclass
class Turn:
    """A sampled message.

    Attributes:
        reward: Reward of the turn, with the episode's rest added at the end.
        values: The critic's value before each of its tokens.
        followers: Numbers of the turns that follow it; several at a fork.
        after: The critic's value of its end where the episode was cut there, else 0.
        penalties: What is taken off the reward at each of its tokens; empty for nothing.
    """

    reward: float
    values: list[float]
    followers: list[int]
    penalties: list[float] = field(default_factory=list)
    after: float = 0.0

    def penalty(self, token: int) -> float:
        return self.penalties[token] if self.penalties else 0.0


@dataclass
class Entry:
    """One role of one episode.

    Attributes:
        group: Key of the rewards that are compared: task's group and role, or what a baseline says.
        reward: The role's reward.
        turns: Sampled messages in the order of time, whatever their branch.
    """

    group: tuple[str, ...]
    reward: float
    turns: list[Turn]

    @property
    def tokens(self) -> int:
        return sum(len(turn.values) for turn in self.turns)


def group_relative(divisor: str) -> Credit:
    """Reward minus the group's mean, divided: GRPO (``group``), LitePPO (``batch``), MaxRL (``mean``), Dr. GRPO."""

    def credit(entries: list[Entry]) -> list[list[float]]:
        values = centered([[one.reward] for one in entries], entries, divisor)
        return [[value] * one.tokens for (value,), one in zip(values, entries, strict=True)]

    return credit


def others_relative(divisor: str) -> Credit:
    """Reward minus the mean reward of the group's others, divided by a deviation of all of them."""

    def credit(entries: list[Entry]) -> list[list[float]]:
        found = []
        for one, (_, by) in zip(entries, scales([[one.reward] for one in entries], entries, divisor), strict=True):
            others = [o.reward for o in entries if o.group == one.group and o is not one]
            found.append([(one.reward - statistics.fmean(others)) / by if others else 0.0] * one.tokens)
        return found

    return credit


def centered(numbers: list[list[float]], entries: list[Entry], divisor: str) -> list[list[float]]:
    """Takes the mean over the group's numbers off each number, and divides; 0 in a group of one episode."""
    return [
        [(value - mean) / by for value in own]
        for own, (mean, by) in zip(numbers, scales(numbers, entries, divisor), strict=True)
    ]


def scales(numbers: list[list[float]], entries: list[Entry], divisor: str) -> list[tuple[float, float]]:
    """Returns for each entry the mean of its group's numbers and their divisor; infinite where nothing is compared."""
    every = [value for of_one in numbers for value in of_one]
    found = []
    for one in entries:
        members = [of_one for of_one, other in zip(numbers, entries, strict=True) if other.group == one.group]
        group = [value for of_one in members for value in of_one]
        if len(members) < 2 or max(group) == min(group):
            found.append((0.0, math.inf))
            continue
        mean = statistics.fmean(group)
        by = {"none": 1.0, "mean": mean}.get(divisor) or statistics.stdev(group if divisor == "group" else every)
        if divisor in ("group", "batch"):
            by += EPSILON
        found.append((mean, by))
    return found


def leave_one_out(entries: list[Entry]) -> list[list[float]]:
    """Reward minus the mean reward of the group's others (Ahmadian et al. 2024, eq. 7); 0 for an only episode."""
    found = []
    for number, one in enumerate(entries):
        others = [o.reward for n, o in enumerate(entries) if o.group == one.group and n != number]
        found.append([one.reward - statistics.fmean(others) if others else 0.0] * one.tokens)
    return found


def plain_reward(entries: list[Entry]) -> list[list[float]]:
    """The reward itself (Williams 1992), less the penalties from each token on (REINFORCE++, eq. 3)."""
    return [[one.reward - cost for cost in _costs(one)] for one in entries]


def _costs(one: Entry) -> list[float]:
    """Returns for each token the penalties from it to the end; those of alternatives are averaged."""

    def from_token(turn: int, token: int) -> float:
        own = one.turns[turn]
        later = _mean([from_token(follower, 0) for follower in own.followers])
        return sum(own.penalty(place) for place in range(token, len(own.values))) + later

    return [from_token(turn, token) for turn, own in enumerate(one.turns) for token in range(len(own.values))]


def reward_over_deviation(entries: list[Entry]) -> list[list[float]]:
    """The reward divided by the standard deviation over the batch; 0 where it has none."""
    rewards = [one.reward for one in entries]
    deviation = math.inf if len({*rewards}) == 1 else statistics.stdev(rewards) + EPSILON
    return [[(one.reward - cost) / deviation for cost in _costs(one)] for one in entries]


def nothing(entries: list[Entry]) -> list[list[float]]:
    """No credit from rewards (distillation)."""
    return [[0.0] * one.tokens for one in entries]


def returns_of_turns(discount: float, divisor: str) -> Credit:
    """Return of each token minus the mean return of the group's turns: penalties alone tell a turn's tokens apart."""

    def at(one: Entry, now: int, token: int) -> float:
        turn = one.turns[now]
        left = sum(turn.penalty(place) for place in range(token, len(turn.values)))
        return turn.reward - left + discount * _mean([at(one, later, 0) for later in turn.followers])

    def credit(entries: list[Entry]) -> list[list[float]]:
        returns = [[at(one, now, 0) for now in range(len(one.turns))] for one in entries]
        return [
            [
                (at(one, now, token) - mean) / by
                for now, turn in enumerate(one.turns)
                for token in range(len(turn.values))
            ]
            for one, (mean, by) in zip(entries, scales(returns, entries, divisor), strict=True)
        ]

    return credit


def generalised(discount: float, decay: float) -> Credit:
    """Generalised advantage estimates of each sampled token (Schulman et al. 2016, eq. 16), token by token."""

    def at(one: Entry, turn: int, token: int) -> float:
        """Returns the estimate of a token from those of the tokens that come next."""
        own = one.turns[turn]
        last = token + 1 == len(own.values)
        following = [(later, 0) for later in own.followers] if last else [(turn, token + 1)]
        value = _mean([one.turns[t].values[place] for t, place in following]) if following else own.after
        error = own.reward * last - own.penalty(token) + discount * value - own.values[token]
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
