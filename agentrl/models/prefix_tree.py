"""Prefix trees: token sequences that store, and compute, common prefixes once.

Nodes are in depth-first order, so the descendants of a node directly follow it, and one number per node (``ends``)
defines the attention mask. A causal transformer with this mask and ``positions`` computes at each node what it would
compute for the sequence alone.

Guarantees: any order of sequences gives a correct tree; sorted sequences share the most. Does not import torch.
"""

from collections.abc import Sequence


class PrefixTree:
    """A forest of prefix trees; each node is a token.

    Attributes:
        token_ids: ``[nodes]`` token id of each node.
        positions: ``[nodes]`` depth of each node, which is the token's position in its sequence.
        ends: ``[nodes]`` index after each node's last descendant: node ``j`` is node ``i`` or an ancestor of it if and
            only if ``j <= i < ends[j]``.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.ends: list[int] = []
        self._path: list[int] = []  # nodes of the latest sequence
        self._latest: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def shared(self, sequence: Sequence[int]) -> int:
        """Returns the number of leading tokens that a sequence shares with the latest one."""
        return common_prefix(self._latest, sequence)

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Adds a sequence and returns the node of each of its tokens."""
        shared = self.shared(sequence)
        first = len(self)
        path = self._path[:shared] + list(range(first, first + len(sequence) - shared))
        self.token_ids += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.ends += [0] * (len(sequence) - shared)
        if shared < len(sequence):
            for node in path:
                self.ends[node] = len(self)
        self._path, self._latest = path, sequence
        return path


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts equal leading tokens."""
    limit = min(len(first), len(second))
    for position in range(limit):
        if first[position] != second[position]:
            return position
    return limit
