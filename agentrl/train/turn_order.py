"""The order of an episode's turns in time: which turns follow which.

Guarantees: a turn is followed only by later ones; without forks it is followed by the next turn of its role, in
whichever conversation that is. Only forks of one conversation (another sample of the same call, a return to an earlier
message) are alternatives, which do not follow each other.

A session stores messages in the order in which they were sampled, so the order of messages is the order of time. A
conversation is all that is below one first message (root). One that is known to go on from an answer of another counts
as part of that one: the chat template rewrites earlier turns (``inference.history=branch``), or the history before the
latest answer was shortened. A role begins another conversation when no such answer is known: its context is a summary,
or the agent holds several.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TurnOrder:
    """The turns of one role in one episode, in the order of time.

    Attributes:
        messages: ``[turns]`` index of each turn's message.
        parents: ``[turns]`` number of the previous turn on the branch; ``None`` for the first turns of a conversation.
        roots: ``[turns]`` number of the conversation.
    """

    messages: list[int]
    parents: list[int | None]
    roots: list[int]

    @classmethod
    def of(
        cls,
        parents: NDArray[np.integer],
        sampled: NDArray[np.bool_],
        first: int = 0,
        follows: NDArray[np.integer] | None = None,
    ) -> "TurnOrder":
        """Finds the turns among a trajectory's messages.

        Args:
            parents: ``[messages]`` index of the previous message within the trajectory; -1 for a first message.
            sampled: ``[messages]`` whether the policy sampled the message.
            first: Index of the trajectory's first message, added to the indices of messages.
            follows: ``[messages]`` index of the answer that a first message's conversation goes on from; -1 if not
                known.
        """
        order = cls([], [], [])
        latest: list[int | None] = []  # the turn at, or the latest one before, each message
        roots: list[int] = []
        before_it = parents if follows is None else np.where(parents < 0, follows, parents)
        for message, (parent, own) in enumerate(zip(before_it.tolist(), sampled.tolist(), strict=True)):
            before = latest[parent] if parent >= 0 else None
            roots.append(roots[parent] if parent >= 0 else message)
            latest.append(len(order.messages) if own else before)
            if own:
                order.messages.append(first + message)
                order.parents.append(before)
                order.roots.append(roots[-1])
        return order


def followers(parents: Sequence[int | None], roots: Sequence[int]) -> list[list[int]]:
    """Lists, for each turn, the turns that follow it in time: none at an end, several at a fork.

    A turn is followed by the turns after it on its own branch, unless its role first speaks in another conversation:
    then by the turn there. So a turn at the end of its branch, too, goes on in the next conversation. Turns that
    continue the same turn of a conversation (or begin the same one) are a fork: alternatives at one time, such as the
    samples of one call.

    Args:
        parents: ``[turns]`` index of the previous turn on the branch; ``None`` for the first turns of a conversation.
        roots: ``[turns]`` number of the conversation.
    """
    siblings: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for index, place in enumerate(zip(roots, parents, strict=True)):
        siblings[place].append(index)
    found: list[list[int]] = [[] for _ in parents]
    elsewhere: int | None = None  # the first later turn of another conversation
    for index in reversed(range(len(parents))):
        if index + 1 < len(parents) and roots[index + 1] != roots[index]:
            elsewhere = index + 1
        own = siblings.get((roots[index], index), [])
        if elsewhere is None or (own and own[0] < elsewhere):
            found[index] = own
        else:
            fork = siblings[roots[elsewhere], parents[elsewhere]]
            found[index] = [one for one in fork if one >= elsewhere]
    return found
