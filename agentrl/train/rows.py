"""Rows: branches with common prefixes, computed together as one prefix tree.

A row is a plan: which branches it holds, and how many leading tokens each shares with the previous one. So a group's
prompt, a system prompt of several groups, and equal beginnings of answers are computed once. :func:`lay_out` makes a
row's arrays when its micro-batch is computed.

Guarantees: each trained token appears once for each branch that trains it; ``positions`` and ``ends`` let each token
attend to exactly the tokens of its own branch; the same branches give the same rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.experts import UNKNOWN, wide
from agentrl.train.branches import Branch, TokenColumns, experts_of, input_length, token_ids, tokens_of

LEAST_SHARED = 1 / 32  # least shared fraction of a branch that joins a row under sparse attention


@dataclass
class Row:
    """Branches that are computed as one tree.

    Attributes:
        branches: Indices into the branches of the batch or of the rank.
        shared: For each branch, number of leading tokens that it shares with the previous branch of the row.
        inputs: For each branch, number of computed tokens: those before its last trained token.
        length: Number of nodes of the tree.
        depths: Sum of the nodes' positions, which the cost of attention depends on.
    """

    branches: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    length: int = 0
    depths: int = 0

    def __len__(self) -> int:
        return self.length

    def add(self, branch: int, inputs: int, shared: int) -> None:
        """Adds a branch of ``inputs`` computed tokens that shares the first ``shared`` with the row's latest branch."""
        self.branches.append(branch)
        self.shared.append(shared)
        self.inputs.append(inputs)
        self.length += inputs - shared
        self.depths += (inputs * (inputs - 1) - shared * (shared - 1)) // 2


@dataclass(frozen=True, eq=False)
class RowArrays:
    """The arrays of a row: its tree and its trained tokens.

    Attributes:
        token_ids: int32 ``[length]``.
        positions: int32 ``[length]`` depth of each node.
        ends: int32 ``[length]`` index after each node's last descendant: node ``i`` attends to the nodes ``j <= i``
            with ``i < ends[j]``.
        sources: int32 ``[distinct]`` node whose hidden state gives each distinct prediction.
        targets: int32 ``[distinct]`` token id of each distinct prediction.
        trained: int32 ``[trained]`` index into ``sources`` and ``targets`` of each trained token.
        own: int64 ``[trained]`` index of each trained token into the columns of sampled tokens.
        places: int64 ``[trained]`` index of each trained token in the global batch.
        sequences: int32 ``[trained]`` number of each trained token's branch in the global batch.
        turns: int32 ``[trained]`` number of each trained token's turn in its trajectory.
        weights: float32 ``[trained]`` weight of each trained token in the loss, before the normalizer.
        images: Bytes of the images' files, in the order of their placeholders; of plain rows alone.
        pictured: bool ``[length]`` whether a token is of a message that holds images; ``[0]`` without images.
        experts: int16 ``[length, width]`` experts to replay, negative where they are not known; ``[0, 0]`` without any.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    ends: NDArray[np.int32]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    trained: NDArray[np.int32]
    own: NDArray[np.int64]
    places: NDArray[np.int64]
    sequences: NDArray[np.int32]
    turns: NDArray[np.int32]
    weights: NDArray[np.float32]
    images: tuple[bytes, ...] = ()
    pictured: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    experts: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0), np.int16))


def build_rows(
    branches: Sequence[Branch], tokens: TokenColumns, max_tokens: int, attention_span: float = 4096.0
) -> list[Row]:
    """Plans rows of at most ``max_tokens`` nodes; a longer branch gets its own row.

    A row costs its length plus, with dense attention, its length squared over ``attention_span``. A branch joins the
    row of its predecessor (branches are sorted by tokens, so that neighbors share most) only if that is cheaper than
    its own row: long answers to one short prompt stay apart. With sparse attention (an infinite span) any common prefix
    saves cost, but a branch joins only if it shares at least ``LEAST_SHARED`` of its tokens, because small rows fill
    bins best. Where experts are replayed, tokens are shared only as far as their experts are the same.

    Args:
        branches: Branches with trained tokens.
        tokens: Token columns that the branches index.
        max_tokens: Largest number of nodes of a row.
        attention_span: Row length at which attention costs as much as the rest of the model (see
            :func:`attention_span`); infinite if attention computes only the ancestors of each token.

    Raises:
        ValueError: The first token of a branch is to be trained.
    """
    sparse = math.isinf(attention_span)
    ids = [token_ids(branch, tokens) for branch in branches]
    experts = [experts_of(branch, tokens) for branch in branches] if len(tokens.experts) else None
    lengths = [input_length(branch, tokens) for branch in branches]
    _check_first(branches, tokens)
    # Big-endian bytes of numbers from 0 on sort as the lists of numbers do.
    keys = [one[:length].astype(">i4").tobytes() for one, length in zip(ids, lengths, strict=True)]
    order = sorted(range(len(branches)), key=keys.__getitem__)
    del keys

    def cost(length: int) -> float:
        return length + length * length / attention_span

    def joins(row: Row, inputs: int, shared: int) -> bool:
        grown = len(row) + inputs - shared
        if grown > max_tokens or (sparse and shared < LEAST_SHARED * inputs):
            return False
        return cost(grown) - cost(len(row)) <= cost(inputs)

    rows: list[Row] = []
    for before, index in zip([None, *order], order, strict=False):
        inputs = lengths[index]
        shared = 0 if before is None else _common(ids[before][: lengths[before]], ids[index][:inputs])
        if experts is not None and before is not None:
            shared = _common(experts[before][:shared], experts[index][:shared])
        if not rows or not joins(rows[-1], inputs, shared):
            rows.append(Row())
            shared = 0
        rows[-1].add(index, inputs, shared)
    return rows


def lone_rows(branches: Sequence[Branch], tokens: TokenColumns) -> list[Row]:
    """Plans one row for each branch, for models that do not compute prefix trees.

    Raises:
        ValueError: The first token of a branch is to be trained.
    """
    _check_first(branches, tokens)
    rows = []
    for index, branch in enumerate(branches):
        rows.append(Row())
        rows[-1].add(index, input_length(branch, tokens), 0)
    return rows


def _check_first(branches: Sequence[Branch], tokens: TokenColumns) -> None:
    if any(_trains_first(branch, tokens) for branch in branches):
        raise ValueError("the first token of a sequence cannot be trained: nothing predicts it")


def _trains_first(branch: Branch, tokens: TokenColumns) -> bool:
    for message, trained in zip(branch.messages, branch.trained, strict=True):
        first, end = tokens.starts[message], tokens.starts[message + 1]
        if first < end:  # messages without tokens are skipped
            return trained and bool(tokens.loss_mask[first])
    return False


def _common(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Counts equal leading tokens, or equal leading rows of numbers."""
    limit = min(len(first), len(second))
    different = first[:limit] != second[:limit]
    if different.ndim > 1:
        different = different.any(-1)
    at = int(different.argmax()) if limit else 0
    return at if limit and different[at] else limit


def lay_out(row: Row, branches: Sequence[Branch], tokens: TokenColumns) -> RowArrays:
    """Makes the arrays of a row, whose branch indices are into ``branches``."""
    ids, positions, ends = (np.empty(row.length, np.int32) for _ in range(3))
    experts = np.full((row.length if len(tokens.experts) else 0, tokens.experts.shape[1]), UNKNOWN, np.int16)
    path = np.empty(0, np.int32)
    sources, targets = [], []
    kept: dict[str, list[NDArray[Any]]] = {"own": [], "places": [], "sequences": [], "turns": [], "weights": []}
    length, repeats = 0, False
    for index, shared, inputs in zip(row.branches, row.shared, row.inputs, strict=True):
        branch = branches[index]
        found = tokens_of(branch, tokens)
        grown = length + inputs - shared
        ids[length:grown] = found.token_ids[shared:inputs]
        positions[length:grown] = np.arange(shared, inputs)
        if len(experts):
            experts[length:grown] = wide(experts_of(branch, tokens)[shared:inputs])
        path = np.concatenate([path[:shared], np.arange(length, grown, dtype=np.int32)])
        if shared < inputs:
            ends[path] = grown
        repeats = repeats or (length > 0 and len(found.positions) > 0 and int(found.positions[0]) <= shared)
        sources.append(path[found.positions - 1])
        targets.append(found.token_ids[found.positions])
        kept["own"].append(found.own)
        kept["places"].append(found.places)
        kept["sequences"].append(np.full(len(found.own), branch.number, np.int32))
        kept["turns"].append(found.turns)
        kept["weights"].append(np.full(len(found.own), branch.weight, np.float32))
        length = grown
    source, target = np.concatenate(sources), np.concatenate(targets)
    trained = np.arange(len(source), dtype=np.int32)
    if repeats:  # two branches may have the same prediction
        _, first, places = np.unique(source.astype(np.int64) << 32 | target, return_index=True, return_inverse=True)
        trained = places.astype(np.int32)
        source, target = source[first], target[first]
    joined = {name: np.concatenate(values) for name, values in kept.items()}
    images, pictured = _pictures(row, branches, tokens) if tokens.images else ((), np.zeros(0, bool))
    return RowArrays(
        ids, positions, ends, source, target, trained, **joined, images=images, pictured=pictured, experts=experts
    )


def _pictures(
    row: Row, branches: Sequence[Branch], tokens: TokenColumns
) -> tuple[tuple[bytes, ...], NDArray[np.bool_]]:
    """Returns the images of a plain row, and which of its tokens are of messages that hold them.

    Raises:
        ValueError: The row is a tree of several branches, in which images are not possible.
    """
    if len(row.branches) > 1:
        raise ValueError("sequences with images cannot be computed as prefix trees")
    images, pictured, start = (), np.zeros(row.length, bool), 0
    for message in branches[row.branches[0]].messages:
        end = start + int(tokens.starts[message + 1] - tokens.starts[message])
        if message in tokens.images and end <= row.length:  # what follows the last trained token is not computed
            images += tokens.images[message]
            pictured[start:end] = True
        start = end
    return images, pictured


def attention_span(hidden_size: int) -> float:
    """Returns the row length in tokens at which dense attention costs as much as the linear layers of a usual decoder.

    A layer has about ``12 * hidden²`` weights with 2 operations each per token; attention adds ``4 * hidden`` per pair.
    """
    return 6.0 * hidden_size
