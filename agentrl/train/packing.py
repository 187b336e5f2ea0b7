"""From sequences to rows: what sequences begin with in common is computed once, as a tree.

A row is a :class:`~agentrl.models.prefix_tree.PrefixTree`: a group's prompt is its trunk, a system prompt may be the
trunk of several groups, and equal beginnings of answers are one branch. Positions and an attention mask let each token
see exactly what it would see alone.

Guarantees: each trained token appears once for each sequence that trains it; the split into rows changes no token's
inputs; all ranks build the same rows from the same sequences.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.models.prefix_tree import PrefixTree

LEAST_SHARED = 1 / 32  # of a sequence that joins a row under sparse attention


@dataclass(frozen=True)
class TrainSequence:
    """One branch of an episode, ready to train.

    Attributes:
        token_ids: ``[tokens]``.
        loss_mask: ``[tokens]`` 1 where the token is trained.
        logprobs: ``[tokens]`` behavior logprobs.
        advantages: ``[tokens]``, of those that are trained; may be empty where nothing asks for them.
        weight: Of each of its tokens in the loss, before the batch's normalizer.
        versions: ``[tokens]`` policy versions that sampled; may be empty where nothing asks for them.
        group: Number of its group: an update takes whole groups.
        values: ``[tokens]`` the critic's when the step began, of those that are trained; empty without a critic.
        returns: ``[tokens]`` what the critic should have said.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    advantages: Sequence[float]
    weight: float = 1.0
    versions: Sequence[int] = ()
    group: int = 0
    values: Sequence[float] = ()
    returns: Sequence[float] = ()


@dataclass
class Row:
    """One packed row.

    Attributes:
        tree: Inputs, ``[length]``.
        predictions: ``[distinct]`` pairs of a node and the token that its hidden state predicts.
        trained: ``[trained]`` index into ``predictions`` of each trained token.
        origins: ``[trained]`` place of each in the batch's table of trained tokens.
    """

    tree: PrefixTree = field(default_factory=PrefixTree)
    predictions: list[tuple[int, int]] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tree)

    def add(self, sequence: TrainSequence, inputs: Sequence[int], first: int) -> None:
        """Add a sequence, of which only ``inputs`` are computed; its first trained token has place ``first``."""
        path = self.tree.add(inputs)
        for position, trained in enumerate(sequence.loss_mask):
            if trained:
                key = (path[position - 1], sequence.token_ids[position])
                index = self._known.setdefault(key, len(self.predictions))
                if index == len(self.predictions):
                    self.predictions.append(key)
                self.trained.append(index)
                self.origins.append(first)
                first += 1


def _inputs(sequence: TrainSequence) -> Sequence[int]:
    """Tokens before the last trained one: it, and what follows, predict nothing trained."""
    mask = list(sequence.loss_mask)
    return sequence.token_ids[: len(mask) - 1 - mask[::-1].index(1)]


def build_rows(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    attention_span: float = 4096.0,
    firsts: Sequence[int] | None = None,
) -> list[Row]:
    """Pack sequences into rows of at most ``max_tokens`` tokens (a longer sequence gets its own row).

    A row costs its length plus, because its attention is dense, its length squared over ``attention_span``. A sequence
    joins the row of its predecessor (in sorted order, where neighbours share most) only if that is cheaper than a row
    of its own: long answers to one short prompt stay apart. Where attention is sparse (an infinite span) any common
    beginning saves something; it counts from a share of ``LEAST_SHARED`` on, because small rows fill bins best.

    Args:
        sequences: Those that train nothing are left out.
        max_tokens: Most tokens of a row.
        attention_span: Row length at which attention costs as much as all else (see :func:`attention_span`); infinite
            where each token attends to its own ancestors only, whatever else is in the row.
        firsts: Place of each sequence's first trained token in the batch's table; by default one after the other.
    """
    useful = []
    sparse = math.isinf(attention_span)
    for sequence, first in zip(sequences, firsts or first_places(sequences), strict=True):
        if any(sequence.loss_mask):
            if sequence.loss_mask[0]:
                raise ValueError("the first token of a sequence cannot be trained: nothing predicts it")
            useful.append((_inputs(sequence), sequence, first))

    def cost(length: int) -> float:
        return length + length * length / attention_span

    def joins(row: Row, inputs: Sequence[int]) -> bool:
        shared = row.tree.shared(inputs)
        grown = len(row) + len(inputs) - shared
        if grown > max_tokens or (sparse and shared < LEAST_SHARED * len(inputs)):
            return False
        return cost(grown) - cost(len(row)) <= cost(len(inputs))

    rows: list[Row] = []
    for inputs, sequence, first in sorted(useful, key=lambda entry: list(entry[0])):
        if not rows or not joins(rows[-1], inputs):
            rows.append(Row())
        rows[-1].add(sequence, inputs, first)
    return rows


def first_places(sequences: Sequence[TrainSequence]) -> list[int]:
    """Number of trained tokens before each sequence."""
    counts = [sum(sequence.loss_mask) for sequence in sequences]
    return [0, *itertools.accumulate(counts)][:-1]


def attention_span(hidden_size: int) -> float:
    """Row length at which dense attention costs as much as the linear layers, for the usual decoder.

    A layer has about ``12 * hidden²`` weights, 2 operations each per token; attention adds ``4 * hidden`` per pair.
    """
    return 6.0 * hidden_size
