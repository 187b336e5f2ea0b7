"""The token ledger of one conversation: stored messages with their token ids.

Guarantees: a shared history is stored once; finding a stored conversation costs one comparison per message and no
rendering, whichever other conversations begin alike; a stored node never changes, except for its reward, and for the
experts of its tokens, which a server names with a later answer: the first that are named stay.

Conversations are found by places: a place stands for a sequence of messages, and holds the nodes that end there, which
may be several: a conversation that was rendered again has nodes of its own for the same messages.
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from agentrl.core.episode import NOT_SAMPLED, Message, Node, Trajectory
from agentrl.core.experts import UNKNOWN, ExpertRows
from agentrl.core.image_reader import PromptImage
from agentrl.core.message_shape import in_shape
from agentrl.inference.messages import essence, essences

ROOT = -1


class _Known(NamedTuple):
    """A message of the latest call, and its place among all conversations."""

    message: Message
    place: int


class _Object(NamedTuple):
    """An ``openai`` object of the latest call, its place, and what it said then."""

    place: int
    message: Any
    said: tuple[Any, ...]


class Ledger:
    """Nodes of a trajectory, found by their messages."""

    def __init__(self) -> None:
        self.trajectory = Trajectory()
        self._next: dict[tuple[int, str], int] = {}  # place and key of the message that follows -> place
        self._ends: list[list[int]] = []  # nodes of each place that can be continued
        self._places: list[int] = []  # place of each node
        self._latest: list[_Known] = []
        self._as_given: list[Any] = []  # the same messages as the agent passed them
        self._objects: list[_Object] = []  # those of them that are objects, which an agent may change in place
        self._latest_tools = ""
        self._answers: dict[str, list[int]] = {}  # sampled nodes by their message
        self._depths: list[int] = []  # number of messages before each node
        self._firsts: list[int] = []  # first node of each node's conversation
        self._prompt: tuple[int, list[int]] = (ROOT, [])  # node and ids of the latest call of `prompt`
        self._images: dict[int, list[PromptImage]] = {}  # of nodes that hold images, with places in their own ids

    def node(self, index: int) -> Node:
        """The stored node with this index."""
        return self.trajectory.nodes[index]

    def first(self, index: int) -> Node:
        """The first node of the conversation that a node belongs to, however long it is."""
        return self.trajectory.nodes[self._firsts[index]]

    def find(self, messages: Sequence[Any], tools: str, *, images: bool = False) -> tuple[list[Message], int | None]:
        """Finds the stored path to continue; returns the messages that follow it, and its last node.

        New messages may follow a sampled answer, or start a conversation: the messages between two answers were
        rendered together, so no new message can follow one of them. An ``openai`` message object that was passed before
        counts as unchanged while its content and its calls are the same.

        Args:
            messages: The conversation's messages, as dicts or ``openai``'s objects.
            tools: The conversation's tools as text; another set of tools is another conversation.
            images: Whether messages may hold images.

        Raises:
            TypeError: An element of ``messages`` is no message.
        """
        path = self._latest[: self._unchanged(messages, tools)]
        rest = [in_shape(message, images=images) for message in messages[len(path) :]]
        new = 0
        for given, message in zip(messages[len(path) :], rest, strict=True):
            place = path[-1].place if path else ROOT
            keys = ((place, key if path else tools + key) for key in essences(message))
            found = next((self._next[key] for key in keys if key in self._next), None)
            if found is None:
                break
            path.append(_Known(message, found))
            if not isinstance(given, dict):
                self._objects.append(_Object(len(self._as_given), given, _said(given)))
            self._as_given.append(_kept(given, message))
            new += 1
        rest = rest[new:]
        self._latest, self._latest_tools = path, tools
        for depth in range(len(path), 0, -1):
            node = self._end(path[depth - 1].place, whole=depth == len(messages))
            if node is not None:
                return [known.message for known in path[depth:]] + rest, node
        return [known.message for known in path] + rest, None

    def _end(self, place: int, *, whole: bool) -> int | None:
        """The node of a place that new messages continue: of the newest parent, the first one.

        Args:
            place: A place.
            whole: Whether nothing follows, so that also a prompt can be continued.
        """
        nodes = self.trajectory.nodes
        found = [index for index in self._ends[place] if whole or nodes[index].finish_reason is not None]
        return next((index for index in found if nodes[index].parent == nodes[found[-1]].parent), None)

    def _unchanged(self, messages: Sequence[Any], tools: str) -> int:
        """Count the leading messages shared with the latest call, and forget the others."""
        known = self._as_given if tools == self._latest_tools else []
        if list(messages[: len(known)]) != known:  # fast case: a conversation usually only grows
            same = (
                given == old if isinstance(given, dict) else given is old
                for given, old in zip(messages, known, strict=False)
            )
            known = known[: next((depth for depth, equal in enumerate(same) if not equal), len(messages))]
        changed = (one.place for one in self._objects if _said(one.message) != one.said)
        known = known[: next(changed, len(known))]
        self._as_given = known
        self._objects = [one for one in self._objects if one.place < len(known)]
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
                at=time.time(),
                tools=self.trajectory.toolset(tools) if index == ROOT else None,
            )
            index = self.add(node, tools)
        return index

    def hold_images(self, index: int, images: list[PromptImage]) -> None:
        """Stores the images of a node, with the places of their placeholders in its ids."""
        if images:
            self._images[index] = images

    def images(self, index: int) -> tuple[PromptImage, ...]:
        """Images from the root to a node, with the places of their placeholders in the ids of :meth:`prompt`."""
        if not self._images:
            return ()
        found: list[PromptImage] = []
        before = 0
        for step in self.trajectory.path(index):
            found += [PromptImage(one.url, one.start + before, one.end + before) for one in self._images.get(step, ())]
            before += len(self.node(step).token_ids)
        return tuple(found)

    def experts_from(self, index: int) -> int:
        """First position, in the ids of :meth:`prompt`, of a token whose experts are not known yet; 0 without any."""
        position = 0
        for step in self.trajectory.path(index):
            node = self.node(step)
            if node.token_ids:
                unknown = [0] if node.experts is None else node.experts.unknown
                if len(unknown):
                    return position + int(unknown[0])
            position += len(node.token_ids)
        return position

    def hold_experts(self, index: int, experts: ExpertRows, start: int) -> None:
        """Stores the experts of the tokens from the root to a node, where they are not known yet.

        Args:
            index: A node.
            experts: Experts of the tokens from ``start`` on.
            start: Position in the ids of :meth:`prompt`.
        """
        rows, position = experts.array(), 0
        for step in self.trajectory.path(index):
            node, count = self.node(step), len(self.node(step).token_ids)
            first, end = max(start, position), min(start + len(rows), position + count)
            if first < end:
                kept = np.full((count, experts.width), UNKNOWN, np.int16)
                kept[first - position : end - position] = rows[first - start : end - start]
                if node.experts is not None:
                    known = node.experts.array()
                    kept = np.where(known >= 0, known, kept)
                node.experts = ExpertRows.of(kept)
            position += count

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
        same = [index for index in equal if self._depths[index] == last and self._history(index) == history]
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
        parent, index = node.parent, len(nodes) - 1
        self._depths.append(0 if parent is None else self._depths[parent] + 1)
        self._firsts.append(index if parent is None else self._firsts[parent])
        before = ROOT if parent is None else self._places[parent]
        keys = essences(node.message)
        places = [(before, tools + key if parent is None else key) for key in keys]
        place = self._next.setdefault(places[0], len(self._ends))  # one for each reasoning
        if place == len(self._ends):
            self._ends.append([])
        self._next.setdefault(places[-1], place)
        self._places.append(place)
        if node.finish_reason is not None or node.token_ids:
            self._ends[place].append(index)
        if node.finish_reason is not None:
            for key in keys:
                self._answers.setdefault(key, []).append(index)
        return index

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


def _kept(given: Any, message: Message) -> Any:
    """Returns a message as it is compared when it comes again: itself, or a copy that the agent cannot change."""
    if not isinstance(given, dict):
        return given
    if all(isinstance(value, str) for value in given.values()):
        return message
    return deepcopy(given)  # its shape is another one: fields that are null, parts of text


def _said(message: Any) -> tuple[Any, ...]:
    """Returns what a message object says: its content, and the names and arguments of its calls."""
    functions = [getattr(call, "function", None) for call in getattr(message, "tool_calls", None) or ()]
    calls = [(getattr(one, "name", None), getattr(one, "arguments", None)) for one in functions]
    return getattr(message, "content", None), calls
