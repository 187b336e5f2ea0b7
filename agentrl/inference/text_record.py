"""Records the conversations with a server of text as a graph of messages without ids.

Guarantees: a shared history is stored once, and so is each set of tools; each answer is a node of its own, also of
several answers to one prompt, and equal ones. Another set of tools is another conversation, as in a session with ids
(:mod:`agentrl.inference.ledger`).
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.messages import essence

_ROOT = -1


class TextRecord:
    """A trajectory of text, found by its messages."""

    def __init__(self) -> None:
        self.trajectory = Trajectory.of_checked({"nodes": [], "tools": []})
        self._children: dict[tuple[int, str], int] = {}

    def add_prompt(self, messages: Sequence[Message], tools: Any) -> int | None:
        """Stores the messages of a call that are new; returns the node of the last one, ``None`` without messages.

        Args:
            messages: The conversation, as plain data.
            tools: The tools of the call.
        """
        step, key = _ROOT, _text(tools) if isinstance(tools, list) and tools else ""
        for message in messages:
            found = self._children.get((step, key + _key(message)))
            step = self._add(step, message, key) if found is None else found
            key = ""
        return None if step == _ROOT else step

    def add_answer(
        self,
        parent: int | None,
        message: Message,
        finish_reason: str,
        sampling: dict[str, Any] | None = None,
        usage: dict[str, int] | None = None,
    ) -> int:
        """Stores an answer and returns its node; of equal answers to a prompt, the conversation goes on from the first.

        Args:
            parent: Node of the prompt's last message.
            message: The answer.
            finish_reason: Finish reason, as the server gave it.
            sampling: Sampling options that the call set.
            usage: Numbers of the call's tokens, see :class:`~agentrl.core.episode.Node`.
        """
        index = self._add(_ROOT if parent is None else parent, message, "")
        node = self.trajectory.nodes[index]
        node.finish_reason, node.sampling, node.usage = finish_reason, sampling, usage
        return index

    def _add(self, parent: int, message: Message, key: str) -> int:
        nodes = self.trajectory.nodes
        above = None if parent == _ROOT else parent
        nodes.append(_node(above, message, self.trajectory.toolset(key)))
        self._children.setdefault((parent, key + _key(message)), len(nodes) - 1)
        return len(nodes) - 1


def _node(parent: int | None, message: Message, tools: int | None) -> Node:
    """Makes a message's node without validating what was checked before: an evaluation makes two for each task."""
    return Node.of_checked(
        {
            **{"parent": parent, "message": message, "at": time.time(), "tools": tools},
            **{"token_ids": [], "loss_mask": [], "logprobs": [], "versions": [], "teacher_logprobs": []},
            **{"finish_reason": None, "reward": None, "follows": None, "sampling": None, "usage": None},
            "experts": None,
        }
    )


def _key(message: Message) -> str:
    """Returns a key of what a model sees of a message, which may hold more than text."""
    return essence(message) if isinstance(message.get("content"), str) else _text(message)


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)
