"""Layouts turn the rows of a micro-batch into tensors: padded (stacked in a rectangle) or packed (end to end).

Guarantees: with either layout each token has the position and attends to the keys of its own branch, so the choice
changes only rounding; an empty list of rows gives a micro-batch without trained tokens, which still takes part in
collectives.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.models.tree_mask import tree_mask
from agentrl.train.branches import Branch, TokenColumns
from agentrl.train.mesh import RankMesh
from agentrl.train.micro_batch import MicroBatch, trained_tokens
from agentrl.train.microbatches import MicroBatches, plan_packed, plan_padded
from agentrl.train.row_attention import BLOCK, block_mask, is_packed
from agentrl.train.rows import Row, RowArrays, attention_span, build_rows, lay_out
from agentrl.train.tree_attention import TreeTiles

ROUND = 5  # significant binary digits of a rounded length: padding is at most a sixteenth


class Layout(Protocol):
    """The interface of a layout."""

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """Builds rows of at most ``budget`` tokens each; a longer branch is a row of its own."""
        ...

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """Plans ``[ranks][micro-batches][rows]``; a micro-batch has at most ``budget`` tokens, or one longer row."""
        ...

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """Makes the micro-batch of the given rows."""
        ...


def layout_of(model: Any, mesh: RankMesh | None = None) -> Layout:
    """Returns the layout that a Hugging Face model was prepared for, see :mod:`agentrl.train.row_attention`."""
    span = attention_span(model.config.get_text_config().hidden_size)
    if mesh is not None and mesh.shape.context > 1:
        from agentrl.train.context_parallel import SharedTokens

        return SharedTokens(span, mesh)
    return Packed(span) if is_packed(model) else Padded(span)


class Padded:
    """Padded layout: rows are padded to the longest, with a dense mask.

    Args:
        span: Row length in tokens at which dense attention costs as much as the rest of the model.
    """

    def __init__(self, span: float) -> None:
        self._span = span

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """See :class:`Layout`."""
        return build_rows(branches, tokens, budget, self._span)

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """See :class:`Layout`."""
        return plan_padded(rows, ranks, budget, self._span)

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """See :class:`Layout`."""
        length = max((len(row.token_ids) for row in rows), default=1)
        count = max(len(rows), 1)
        token_ids, positions = np.zeros((count, length), np.int64), np.zeros((count, length), np.int64)
        ends = np.full((count, length), length, np.int64)  # only padding attends to padding
        for index, row in enumerate(rows):
            used = len(row.token_ids)
            token_ids[index, :used], positions[index, :used], ends[index, :used] = (
                row.token_ids,
                row.positions,
                row.ends,
            )
        return MicroBatch(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            mask=tree_mask(torch.from_numpy(ends).to(device)),
            **vars(trained_tokens(rows, range(0, count * length, length)[: len(rows)], tokens, device)),
        )


class Packed:
    """Packed layout: rows lie end to end, and attention computes only pairs that the mask allows.

    Args:
        span: Row length in tokens at which dense attention would cost as much as the rest of the model.
        blocks: Whether the mask is a ``BlockMask`` for ``flex_attention`` (the default on CUDA) or tiles for
            :mod:`agentrl.train.tree_attention` (the default elsewhere).
    """

    def __init__(self, span: float, *, blocks: bool | None = None) -> None:
        self._span = span
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
            mask=self.mask(torch.from_numpy(ends).to(device), blocks=blocks),
            **vars(trained_tokens(rows, firsts[:-1].tolist(), tokens, device)),
        )

    def mask(self, ends: Tensor, *, blocks: bool) -> BlockMask:
        """Makes the attention mask of the forest with these ``ends``, as blocks or as tiles."""
        return block_mask(ends) if blocks else TreeTiles(ends)


def collate(
    rows: Sequence[Row], branches: Sequence[Branch], tokens: TokenColumns, layout: Layout, device: torch.device
) -> MicroBatch:
    """Makes the tensors of a micro-batch from its planned rows."""
    return layout.tensors([lay_out(row, branches, tokens) for row in rows], tokens, device)
