"""Finds the sampled message that an environment acted on.

Guarantees: pure. A message is looked for among those sampled since the latest reward, then among all, the newest call's
first. Of equal samples of one call it is the one with the same reasoning, else the first: the conversation goes on from
that one. An agent may have changed the message: without an equal one, a sample since the latest reward counts that has
the same text but for white space at its ends.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.core.episode import Node
from agentrl.core.message_shape import MessageError, in_shape
from agentrl.inference.messages import essence, essences


def node_of(nodes: Sequence[Node], message: Any, *, since: int) -> int | None:
    """Returns the index of the node that holds ``message``; ``None`` if it was not sampled.

    Args:
        nodes: A role's messages, in the order in which they were stored.
        message: The message that was acted on: a dict, an ``openai`` object, or anything else, which is not found.
        since: Number of nodes at the latest reward.
    """
    try:
        shaped = in_shape(message)
    except (TypeError, MessageError):
        return None
    exact, key, text = essences(shaped)[0], essence(shaped), _text(shaped)
    new, old = range(len(nodes) - 1, since - 1, -1), range(since - 1, -1, -1)

    def same(node: Node) -> bool:
        return essences(node.message)[0] == exact

    def equal(node: Node) -> bool:
        return essence(node.message) == key

    def alike(node: Node) -> bool:
        return bool(text) and _text(node.message) == text

    for indices, fits in ((new, same), (new, equal), (new, alike), (old, same), (old, equal)):
        found = _newest(nodes, indices, fits)
        if found is not None:
            return found
    return None


def _newest(nodes: Sequence[Node], indices: range, fits: Callable[[Node], bool]) -> int | None:
    """Returns the first sample that fits, of the newest call that has one."""
    found: int | None = None
    for index in indices:
        node = nodes[index]
        if found is not None and node.parent != nodes[found].parent:
            return found
        if node.finish_reason is not None and fits(node):
            found = index
    return found


def _text(message: Any) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""
