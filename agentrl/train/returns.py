"""The turns of an episode in the order of time, and the returns along them.

Guarantees: a turn's return holds every reward that its role earned later in the episode, also in conversations that
began anew (another root: ``inference.history=branch``, a shortened context, other tools), except on the other branches
of a fork in its own conversation. Turns of one conversation without forks and the same turns spread over several
conversations have the same returns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from agentrl.train.turn_order import followers


@dataclass(frozen=True)
class Turn:
    """One sampled message.

    Attributes:
        parent: Index of the previous turn on its branch; ``None`` for a first turn.
        tokens: Number of its sampled tokens.
        reward: Reward of the environment step whose action this turn was, scaled as the recipe says; ``None`` if the
            turn was not the action of a step.
        values: ``[tokens]`` the critic's values before each sampled token; empty without a critic.
        after: Bootstrap value: the critic's value after this turn if the role was cut here, else 0.
        root: Number of the conversation that the turn belongs to: all turns below one first message have the same.
        penalties: ``[tokens]`` KL penalty of each sampled token, subtracted from its reward; empty without any.
    """

    parent: int | None
    tokens: int
    reward: float | None = None
    values: tuple[float, ...] = ()
    after: float = 0.0
    root: int = 0
    penalties: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scored:
    """Rewards and turns of one role in one episode: the input of an advantage function.

    Attributes:
        group: Key of the baseline (``trainer.baseline``): episodes with the same key are compared with each other.
        reward: Reward of the role in the whole episode after the clipping and scaling of the recipe's reward section.
        turns: Sampled messages in the order of time; at a fork, several have the same parent.
        terminated: Whether the role came to its own end; if not, it was cut (:mod:`agentrl.core.ending`), and the turns
            that it ended with may have a bootstrap value.
    """

    group: tuple[str, ...]
    reward: float
    turns: tuple[Turn, ...]
    terminated: bool

    @property
    def step_rewards(self) -> tuple[float | None, ...]:
        """The environment's reward for each turn."""
        return tuple(turn.reward for turn in self.turns)

    @cached_property
    def followers(self) -> list[list[int]]:
        """The turns that follow each turn in time, see :func:`followers`."""
        return followers([turn.parent for turn in self.turns], [turn.root for turn in self.turns])

    def rewards(self) -> list[float]:
        """Returns the reward of each turn.

        The part of the episode's reward that no step gave is added to each turn that no other follows.
        """
        rest = self.reward - sum(turn.reward or 0.0 for turn in self.turns)
        ends = [not after for after in self.followers]
        return [(turn.reward or 0.0) + rest * end for turn, end in zip(self.turns, ends, strict=True)]


def returns_to_go(one: Scored, discount: float) -> list[float]:
    """Returns ``[turns]`` returns: each turn's reward plus ``discount`` times the mean return of the next turns.

    The KL penalties of a turn's tokens lower its reward.
    """
    rewards, after = one.rewards(), one.followers
    found = [0.0] * len(rewards)
    for index in reversed(range(len(rewards))):
        found[index] = rewards[index] + discount * _mean([found[follower] for follower in after[index]])
        found[index] -= sum(one.turns[index].penalties)
    return found


def advantage_estimates(one: Scored, discount: float, decay: float) -> list[list[float]]:
    """Returns generalised advantage estimates of each turn's tokens (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    Raises:
        ValueError: A turn has no value for each of its tokens.
    """
    rewards, after = one.rewards(), one.followers
    found: list[list[float]] = [[] for _ in one.turns]
    starts = [(0.0, 0.0)] * len(one.turns)  # value and advantage before a turn's first token
    for index in reversed(range(len(one.turns))):
        turn = one.turns[index]
        if len(turn.values) != turn.tokens:
            raise ValueError("trainer.advantage=gae needs a critic's value of each sampled token")
        next_starts = [starts[follower] for follower in after[index]]
        value = _mean([v for v, _ in next_starts]) if next_starts else turn.after
        carry = _mean([a for _, a in next_starts])
        earned = rewards[index]
        penalties = turn.penalties or (0.0,) * turn.tokens
        for before, penalty in zip(reversed(turn.values), reversed(penalties), strict=True):
            carry = earned - penalty + discount * value - before + discount * decay * carry
            value, earned = before, 0.0
            found[index].append(carry)
        found[index].reverse()
        starts[index] = value, carry
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
