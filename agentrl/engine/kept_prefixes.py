"""The prefix cache: a radix tree over token ids with the keys and values of earlier sequences.

Guarantees: its keys and values come from the current weights (:meth:`KeptPrefixes.forget` follows every change); a
beginning that several sequences share is stored once; it holds at most ``capacity`` tokens, the most recently used; at
least one token of a prompt is left to compute, because its logits are wanted.

System prompts and worked examples repeat with every request, a group's prompt with each of its members, and a
conversation with each of its turns; only the rest is new. A long prompt is computed in parts by keeping each part.
"""

import itertools
from collections.abc import Iterator, Sequence

from agentrl.engine.slots import Piece, SlotCache
from agentrl.models.prefix_tree import common_prefix

LEAST = 16  # tokens; for fewer, a copy costs as much as computing them


class _Edge:
    """Tree edge: the tokens that follow its parent's, with their keys and values."""

    def __init__(self, parent: "_Edge | None", ids: tuple[int, ...], piece: Piece | None) -> None:
        self.parent = parent
        self.ids = ids
        self.piece = piece
        self.children: dict[int, _Edge] = {}
        self.used = 0


class KeptPrefixes:
    """Holds beginnings of sequences with their keys and values.

    Args:
        cache: Keys and values of the running requests.
        capacity: Most tokens to hold; 0 disables the prefix cache.
    """

    def __init__(self, cache: SlotCache, capacity: int) -> None:
        """Start with an empty tree."""
        self.capacity = capacity
        self.tokens = 0
        self.reused_tokens = 0  # prompt tokens so far that were taken from here instead of computed
        self._cache = cache
        self._root = _Edge(None, (), None)
        self._clock = itertools.count(1)

    def shared(self, prompt: Sequence[int]) -> int:
        """Number of leading tokens of a prompt that need not be computed."""
        length = min(sum(count for _, count in self._walk(tuple(prompt))), len(prompt) - 1)
        return length if length >= LEAST else 0

    def restore(self, prompt: Sequence[int], slot: int) -> int:
        """Write the kept leading tokens of a prompt into a slot; returns their number."""
        length, at = self.shared(prompt), 0
        for edge, count in self._walk(tuple(prompt[:length])):
            assert edge.piece is not None
            self._cache.restore(slot, at, edge.piece, count)
            at += count
        self.reused_tokens += length
        return length

    def _walk(self, ids: tuple[int, ...]) -> Iterator[tuple[_Edge, int]]:
        """Yields the edges along a sequence with their number of matching tokens: all, except on the last edge."""
        edge, at, now = self._root, 0, next(self._clock)
        while at < len(ids) and (child := edge.children.get(ids[at])) is not None:
            count = common_prefix(child.ids, ids[at : at + len(child.ids)])
            child.used = now
            last = count < len(child.ids)
            yield child, count  # the caller may cut it
            if last:
                return
            edge, at = child, at + count

    def keep(self, ids: Sequence[int], slot: int) -> None:
        """Keep a sequence whose first ``len(ids)`` positions are in a slot; copies only tokens not kept yet."""
        whole = tuple(ids[: self.capacity])
        if len(whole) < LEAST:
            return
        edge, at = self._root, 0
        for found, count in self._walk(whole):
            edge, at = found, at + count
            if count < len(found.ids):
                edge = self._split(found, count)
        if at == len(whole):
            return
        self._make_room(len(whole) - at, edge)
        leaf = _Edge(edge, whole[at:], self._cache.read(slot, at, len(whole)))
        leaf.used = next(self._clock)
        edge.children[whole[at]] = leaf
        self.tokens += len(leaf.ids)

    def _split(self, edge: _Edge, count: int) -> _Edge:
        """Cut an edge in two; returns the first part."""
        assert edge.parent is not None and edge.piece is not None
        first = _Edge(edge.parent, edge.ids[:count], edge.piece.part(0, count))
        first.used = edge.used
        edge.parent.children[edge.ids[0]] = first
        edge.piece = edge.piece.part(count, len(edge.ids))
        edge.parent, edge.ids = first, edge.ids[count:]
        first.children[edge.ids[0]] = edge
        return first

    def _make_room(self, count: int, spared: _Edge) -> None:
        """Drop the least recently used leaves until ``count`` more tokens fit, but never the path to ``spared``."""
        path = set()
        edge: _Edge | None = spared
        while edge is not None:
            path.add(id(edge))
            edge = edge.parent
        while self.tokens + count > self.capacity:
            leaf = min((e for e in self._leaves() if id(e) not in path), key=lambda e: e.used, default=None)
            if leaf is None:
                return  # only the path itself is left, and it fits: a sequence is cut to the capacity
            assert leaf.parent is not None
            del leaf.parent.children[leaf.ids[0]]
            self.tokens -= len(leaf.ids)

    def _leaves(self) -> Iterator[_Edge]:
        stack = [self._root]
        while stack:
            edge = stack.pop()
            stack += edge.children.values()
            if not edge.children and edge is not self._root:
                yield edge

    def forget(self) -> None:
        """Drop everything: after a weight change, or to release memory."""
        self._root.children.clear()
        self.tokens = 0
