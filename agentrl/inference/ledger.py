"""The token ledger of one conversation: stored messages with their token ids.

Guarantees: a shared history is stored once; finding a stored conversation costs one comparison per message and no
rendering; a stored node never changes, except for its reward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.core.episode import NOT_SAMPLED, Message, Node, Trajectory
from agentrl.core.message_shape import in_shape
from agentrl.inference.messages import essence, essences

ROOT = -1


class _Known(NamedTuple):
    """A message of the latest call, and the index of its node."""

    message: Message
    node: int


class Ledger:
    """Nodes of a trajectory, found by their messages."""

    def __init__(self) -> None:
        self.trajectory = Trajectory()
        self._children: dict[tuple[int, str], int] = {}
        self._latest: list[_Known] = []
        self._as_given: list[Any] = []  # the same messages as the agent passed them
        self._latest_tools = ""
        self._answers: dict[str, list[int]] = {}  # sampled nodes by their message
        self._prompt: tuple[int, list[int]] = (ROOT, [])  # node and ids of the latest call of `prompt`

    def node(self, index: int) -> Node:
        """The stored node with this index."""
        return self.trajectory.nodes[index]

    def find(self, messages: Sequence[Any], tools: str) -> tuple[list[Message], int | None]:
        """Finds the stored path to continue; returns the messages that follow it, and its last node.

        New messages may follow a sampled answer, or start a conversation: the messages between two answers were
        rendered together, so no new message can follow one of them. An ``openai`` message object that was passed before
        counts as unchanged.

        Args:
            messages: The conversation's messages, as dicts or ``openai``'s objects.
            tools: The conversation's tools as text; another set of tools is another conversation.

        Raises:
            TypeError: An element of ``messages`` is no message.
        """
        path = self._latest[: self._unchanged(messages, tools)]
        rest = [in_shape(message) for message in messages[len(path) :]]
        new = 0
        for given, message in zip(messages[len(path) :], rest, strict=True):
            parent = path[-1].node if path else ROOT
            keys = ((parent, key if path else tools + key) for key in essences(message))
            found = next((self._children[key] for key in keys if key in self._children), None)
            if found is None:
                break
            path.append(_Known(message, found))
            self._as_given.append(message if isinstance(given, dict) else given)
            new += 1
        rest = rest[new:]
        self._latest, self._latest_tools = path, tools
        for depth in range(len(path), 0, -1):
            node = self.node(path[depth - 1].node)
            if node.finish_reason is not None or (depth == len(messages) and node.token_ids):
                return [known.message for known in path[depth:]] + rest, path[depth - 1].node
        return [known.message for known in path] + rest, None

    def _unchanged(self, messages: Sequence[Any], tools: str) -> int:
        """Count the leading messages shared with the latest call, and forget the others."""
        known = self._as_given if tools == self._latest_tools else []
        if list(messages[: len(known)]) != known:  # fast case: a conversation usually only grows
            same = (
                given == old if isinstance(given, dict) else given is old
                for given, old in zip(messages, known, strict=False)
            )
            known = known[: next((depth for depth, equal in enumerate(same) if not equal), len(messages))]
        self._as_given = known
        return len(known)

    def add_prompt(self, parent: int | None, messages: Sequence[Message], token_ids: list[int], tools: str) -> int:
        """Store messages that were not sampled; the last of them holds the ids of all."""
        index = ROOT if parent is None else parent
        follows = self._answer_before(messages) if parent is None else None
        for number, message in enumerate(messages, start=1):
            ids = token_ids if number == len(messages) else []
            count = len(ids)
            node = Node(
                parent=None if index == ROOT else index,
                message=message,
                token_ids=ids,
                loss_mask=[0] * count,
                logprobs=[0.0] * count,
                versions=[NOT_SAMPLED] * count,
                follows=follows if index == ROOT else None,
            )
            index = self.add(node, tools)
        return index

    def _answer_before(self, messages: Sequence[Message]) -> int | None:
        """Finds the answer that a new conversation goes on from: its last message of an assistant.

        It is an answer after the same messages, or one of the latest call, after others: the history was shortened.
        """
        last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant"), None)
        keys = () if last is None else essences(messages[last])
        equal = next((self._answers[key] for key in keys if key in self._answers), [])
        if last is None or not equal:
            return None
        history = [essence(message) for message in messages[:last]]
        same = [index for index in equal if self._history(index) == history]
        latest = max(known[-1] for known in self._answers.values())
        found = same or [index for index in equal if self.node(index).parent == self.node(latest).parent]
        # among equal samples of one call, the first
        return next((one for one in found if self.node(one).parent == self.node(found[-1]).parent), None)

    def _history(self, index: int) -> list[str]:
        return [essence(self.node(before).message) for before in self.trajectory.path(index)[:-1]]

    def add(self, node: Node, tools: str = "") -> int:
        """Store a node and return its index; among equal siblings, `find` returns the first."""
        nodes = self.trajectory.nodes
        nodes.append(node)
        parent = ROOT if node.parent is None else node.parent
        keys = essences(node.message)
        for key in keys:
            self._children.setdefault((parent, key if parent != ROOT else tools + key), len(nodes) - 1)
            if node.finish_reason is not None:
                self._answers.setdefault(key, []).append(len(nodes) - 1)
        return len(nodes) - 1

    def prompt(self, index: int) -> list[int]:
        """Ids from the root to a node, both included; callers must not change the list."""
        known, ids = self._prompt
        rest: list[int] = []
        step: int | None = index
        while step is not None and step != known:
            rest.append(step)
            step = self.node(step).parent
        if step != known:
            ids = []
        elif rest:
            ids = list(ids)  # a request may still be reading the old list
        for node in reversed(rest):
            ids += self.node(node).token_ids
        self._prompt = index, ids
        return ids
