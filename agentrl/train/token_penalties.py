"""Returns in which each sampled token has its own KL penalty, for advantages that are one number per turn or episode.

Guarantees: the penalty of a token lowers the returns of that token and of the tokens before it on its branch, and of no
later one; without penalties credit is unchanged. At a fork the penalties of the branches are averaged, like returns.
"""

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.train.returns import Scored, Turn


def penalty_returns(one: "Scored") -> list[float]:
    """Returns ``[turns]`` sums of the penalties from a turn's first token to the end of its branch."""
    found = [0.0] * len(one.turns)
    for index in reversed(range(len(found))):
        after = [found[follower] for follower in one.followers[index]]
        found[index] = sum(one.turns[index].penalties) + (sum(after) / len(after) if after else 0.0)
    return found


def along_turn(value: float, turn: "Turn", divisor: float) -> float | list[float]:
    """Returns the credit of each token of a turn, given that of its first token.

    A later token's return lacks the penalties of the tokens before it.

    Args:
        value: Credit of the turn's first token.
        turn: The turn with its penalties; without any the value itself is returned.
        divisor: Divisor of the returns.
    """
    if not turn.penalties:
        return value
    return [value + passed / divisor for passed in accumulate(turn.penalties[:-1], initial=0.0)]
