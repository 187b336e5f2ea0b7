"""Counts answers that are no answers: refused, filtered, cut or empty.

Guarantees: each sampled answer counts as one kind, the first that fits in the order of :class:`Kind`; a call of a tool
is not empty. The counts change no score: what such an answer earned stays.
"""

from collections import Counter
from enum import StrEnum

from agentrl.core.ending import CUT_ANSWERS
from agentrl.core.episode import Episode, Message


class Kind(StrEnum):
    """A kind of answer that says nothing."""

    REFUSED = "refused"  # the API calls it a refusal
    FILTERED = "filtered"  # a content filter took the answer, or refused the prompt
    CUT = "cut"  # it ended at its length limit
    EMPTY = "empty"  # neither text nor a call of a tool


def count_answers(episode: Episode, counts: Counter[str]) -> None:
    """Adds the number of an episode's sampled answers, ``all``, and how many of them are of each kind."""
    for trajectory in episode.trajectories.values():
        for node in trajectory.nodes:
            if node.finish_reason is None:
                continue
            counts["all"] += 1
            kind = kind_of(node.finish_reason, node.message)
            if kind is not None:
                counts[kind.value] += 1


def kind_of(finish_reason: str, message: Message) -> Kind | None:
    """Returns the kind of a sampled answer that says nothing; ``None`` for any other.

    Args:
        finish_reason: Finish reason, as it was recorded.
        message: The answer.
    """
    if finish_reason == "refusal":
        return Kind.REFUSED
    if finish_reason == "content_filter":
        return Kind.FILTERED
    if finish_reason in CUT_ANSWERS:
        return Kind.CUT
    text = message.get("content")
    return None if (isinstance(text, str) and text.strip()) or message.get("tool_calls") else Kind.EMPTY
