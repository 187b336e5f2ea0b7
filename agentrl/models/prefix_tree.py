"""Token sequences as one tree: what they begin with in common is stored, and computed, once.

Nodes lie in depth-first order, so the descendants of a node are the range after it and one number per node (``ends``)
says who may attend to whom. A causal transformer that gets ``positions`` and that mask computes at each node exactly
what it would compute for the sequence alone.

Guarantees: any order of sequences gives a correct tree; sorted ones share the most. Knows nothing of torch.
"""

from collections.abc import Sequence


class PrefixTree:
    """A forest of tokens.

    Attributes:
        token_ids: ``[nodes]``.
        positions: ``[nodes]`` depth of each, which is its position in its sequence.
        ends: ``[nodes]`` index after the last descendant: node ``j`` is ``i`` or an ancestor of it exactly where
            ``j <= i < ends[j]``.
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
        """Leading tokens of a sequence that the latest one has too: adding it costs only the rest."""
        return common_prefix(self._latest, sequence)

    def add(self, sequence: Sequence[int]) -> list[int]:
        """Add a sequence and return the node of each of its tokens."""
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
    """Number of equal leading tokens."""
    limit = min(len(first), len(second))
    for position in range(limit):
        if first[position] != second[position]:
            return position
    return limit
