"""Layouts turn the rows of a micro-batch into tensors: padded (stacked in a rectangle) or packed (end to end).

A model that can compute prefix trees gets rows that are trees; any other gets one sequence a row.

Guarantees: with either layout each token has the position and attends to the keys of its own branch, so the choice
changes only rounding; an empty list of rows gives a micro-batch without trained tokens, which still takes part in
collectives.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.core.experts import UNKNOWN
from agentrl.models.pixels import Pixels
from agentrl.models.probe import masks_of, packed_inputs
from agentrl.models.tree_mask import Reach
from agentrl.models.way import Way
from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.micro_batch import MicroBatch, trained_tokens
from agentrl.train.microbatches import MicroBatches, plan_packed, plan_padded
from agentrl.train.row_attention import BLOCK, block_mask
from agentrl.train.rows import Row, RowArrays, build_rows, lay_out, lone_rows
from agentrl.train.tree_attention import TreeTiles

TREES = Way()
ROUND = 5  # significant binary digits of a rounded length: padding is at most a sixteenth


class Layout(Protocol):
    """The interface of a layout."""

    @property
    def takes_images(self) -> bool:
        """Whether rows may hold images."""
        ...

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """Builds rows of at most ``budget`` tokens each; a longer branch is a row of its own."""
        ...

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """Plans ``[ranks][micro-batches][rows]``; a micro-batch has at most ``budget`` tokens, or one longer row."""
        ...

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """Makes the micro-batch of the given rows."""
        ...


class Padded:
    """Padded layout: rows are padded to the longest, with a dense mask.

    Args:
        span: Row length in tokens at which dense attention costs as much as the rest of the model.
        way: Masks that the model takes.
    """

    takes_images = False

    def __init__(self, span: float, way: Way = TREES) -> None:
        self._span = span
        self._way = way

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """See :class:`Layout`."""
        return build_rows(branches, tokens, budget, self._span)

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """See :class:`Layout`."""
        return plan_padded(rows, ranks, budget, self._span)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """See :class:`Layout`."""
        token_ids, positions, ends = (torch.from_numpy(part).to(device) for part in _rectangle(rows))
        return MicroBatch(
            token_ids=token_ids,
            positions=positions,
            mask=masks_of(self._way, ends, positions, torch.float32),
            experts=_experts(rows, _firsts(rows, token_ids.shape[1]), token_ids.numel(), device),
            **vars(trained_tokens(rows, _firsts(rows, token_ids.shape[1]), tokens, device)),
        )


def _rectangle(rows: Sequence[RowArrays]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Makes ids, positions and ends, ``[rows, longest]`` each; only padding attends to padding."""
    length = max((len(row.token_ids) for row in rows), default=1)
    count = max(len(rows), 1)
    token_ids, positions = np.zeros((count, length), np.int64), np.zeros((count, length), np.int64)
    ends = np.full((count, length), length, np.int64)
    for index, row in enumerate(rows):
        used = len(row.token_ids)
        token_ids[index, :used], positions[index, :used], ends[index, :used] = row.token_ids, row.positions, row.ends
    return token_ids, positions, ends


def _firsts(rows: Sequence[RowArrays], length: int) -> list[int]:
    """Returns the flat index of each row's first token."""
    return [index * length for index in range(len(rows))]


def _experts(rows: Sequence[RowArrays], firsts: Sequence[int], count: int, device: torch.device) -> Tensor | None:
    """Makes int16 ``[count, width]`` experts to replay; ``None`` if no row has any."""
    found: NDArray[np.int16] | None = None
    for row, first in zip(rows, firsts, strict=True):
        if len(row.experts):
            if found is None:
                found = np.full((count, row.experts.shape[1]), UNKNOWN, np.int16)
            found[first : first + len(row.experts)] = row.experts
    return None if found is None else torch.from_numpy(found).to(device)


class PlainPadded:
    """Plain rows, padded: one sequence a row, with transformers' own masks.

    Nothing follows a sequence in its row but padding, on which its tokens do not depend; so there is no mask of ours.

    Args:
        span: Row length in tokens at which dense attention costs as much as the rest of the model.
        pixels: For a model that takes images, what makes its arguments for them.
    """

    def __init__(self, span: float, pixels: Pixels | None = None) -> None:
        self._span = span
        self._pixels = pixels

    @property
    def takes_images(self) -> bool:
        """See :class:`Layout`."""
        return self._pixels is not None

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """See :class:`Layout`; each branch is a row."""
        return lone_rows(branches, tokens)

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """See :class:`Layout`."""
        return plan_padded(rows, ranks, budget, self._span)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """See :class:`Layout`."""
        token_ids, positions, _ = (torch.from_numpy(part).to(device) for part in _rectangle(rows))
        return MicroBatch(
            token_ids=token_ids,
            positions=positions,
            mask=None,
            pixels=self._images(rows, token_ids),
            experts=_experts(rows, _firsts(rows, token_ids.shape[1]), token_ids.numel(), device),
            **vars(trained_tokens(rows, _firsts(rows, token_ids.shape[1]), tokens, device)),
        )

    def _images(self, rows: Sequence[RowArrays], token_ids: Tensor) -> dict[str, Tensor]:
        """Makes the arguments that hold the rows' images."""
        images = [one for row in rows for one in row.images]
        if not images or self._pixels is None:
            return {}
        pictured = torch.zeros_like(token_ids, dtype=torch.bool)
        for index, row in enumerate(rows):
            pictured[index, : len(row.pictured)] = torch.from_numpy(row.pictured)
        return self._pixels.arguments(token_ids, pictured, images)


class PlainPacked(PlainPadded):
    """Plain rows, packed: sequences end to end, which the model's layers keep apart by their positions and bounds."""

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """See :class:`Layout`."""
        return plan_packed(rows, ranks, budget, self._span)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """See :class:`Layout`."""
        lengths = [len(row.token_ids) for row in rows] or [1]
        token_ids = np.concatenate([row.token_ids for row in rows]) if rows else np.zeros(1, np.int32)
        bounds, firsts = packed_inputs(lengths, device), np.cumsum([0, *lengths[:-1]]).tolist()[: len(rows)]
        return MicroBatch(
            token_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device)[None],
            positions=bounds["position_ids"],
            mask=None,
            bounds=bounds,
            experts=_experts(rows, firsts, len(token_ids), device),
            **vars(trained_tokens(rows, firsts, tokens, device)),
        )


class Packed:
    """Packed layout: rows lie end to end, and attention computes only pairs that the mask allows.

    Args:
        span: Row length in tokens at which dense attention would cost as much as the rest of the model.
        way: Masks that the model takes.
        blocks: Whether the mask is a ``BlockMask`` for ``flex_attention`` (the default on CUDA) or tiles for
            :mod:`agentrl.train.tree_attention` (the default elsewhere).
    """

    takes_images = False

    def __init__(self, span: float, way: Way = TREES, *, blocks: bool | None = None) -> None:
        self._span = span
        self._way = way
        self._blocks = blocks

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """See :class:`Layout`."""
        return build_rows(branches, tokens, budget, math.inf)

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """See :class:`Layout`."""
        return plan_packed(rows, ranks, budget, self._span)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """See :class:`Layout`; the end of the last block is filled with tokens that attend only to themselves.

        On a CPU the length is rounded, so that allocations repeat the same sizes and freed memory can be reused.
        """
        blocks = device.type == "cuda" if self._blocks is None else self._blocks
        firsts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
        used = int(firsts[-1])
        unit = BLOCK if blocks else 1 << max(0, used.bit_length() - ROUND)
        length = max(1, -(-used // unit)) * unit
        token_ids, positions = np.zeros(length, np.int64), np.zeros(length, np.int64)
        ends = np.arange(1, length + 1)
        for first, row in zip(firsts, rows, strict=False):
            here = slice(first, first + len(row.token_ids))
            token_ids[here], positions[here], ends[here] = row.token_ids, row.positions, row.ends + first
        return MicroBatch(
            token_ids=torch.from_numpy(token_ids).to(device)[None],
            positions=torch.from_numpy(positions).to(device)[None],
            mask=self.masks(torch.from_numpy(ends).to(device), torch.from_numpy(positions).to(device), blocks=blocks),
            experts=_experts(rows, firsts[:-1].tolist(), length, device),
            **vars(trained_tokens(rows, firsts[:-1].tolist(), tokens, device)),
        )

    def masks(self, ends: Tensor, positions: Tensor, *, blocks: bool) -> Any:
        """Makes the attention masks of the forest with these ``ends``, as blocks or as tiles."""

        def mask(reach: Reach | None) -> BlockMask:
            return block_mask(ends, positions=positions, reach=reach) if blocks else TreeTiles(ends, positions, reach)

        reaches = self._way.reaches
        if not reaches or "" in reaches:
            return mask(reaches.get(""))
        return {name: mask(reach) for name, reach in reaches.items()}


def collate(
    rows: Sequence[Row], branches: Sequence[Branch], tokens: TokenColumns, layout: Layout, device: torch.device
) -> MicroBatch:
    """Makes the tensors of a micro-batch from its planned rows.

    Raises:
        ValueError: A row holds images, and the model takes none.
    """
    arrays = [lay_out(row, branches, tokens) for row in rows]
    if not layout.takes_images and any(row.images for row in arrays):
        raise ValueError("a sequence holds images, and the model takes none")
    return layout.tensors(arrays, tokens, device)
