"""How the rows of a micro-batch become tensors: padded, one below the other, or packed, end to end.

Guarantees: either layout gives each token the position and the keys that it has in its own branch, so the choice
changes nothing but rounding; no rows at all give a micro-batch with nothing to train, which still takes part in
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
from agentrl.train.micro_batch import MicroBatch, trained_tokens
from agentrl.train.microbatches import MicroBatches, plan_packed, plan_padded
from agentrl.train.row_attention import BLOCK, block_mask, is_packed
from agentrl.train.rows import Row, RowArrays, attention_span, build_rows, lay_out
from agentrl.train.tree_attention import TreeTiles

ROUND = 5  # binary digits of a round length: at most a sixteenth is filled up


class Layout(Protocol):
    """Interface of a layout."""

    def rows(self, branches: Sequence[Branch], tokens: TokenColumns, budget: int) -> list[Row]:
        """Rows of at most ``budget`` tokens each, as far as branches are not longer."""
        ...

    def plan(self, rows: Sequence[Row], ranks: int, budget: int) -> list[MicroBatches]:
        """``[ranks][micro-batches][rows]``; a micro-batch has at most ``budget`` tokens, or one longer row."""
        ...

    def tensors(self, rows: Sequence[RowArrays], tokens: TokenColumns, device: torch.device) -> MicroBatch:
        """The micro-batch of some rows."""
        ...


def layout_of(model: Any) -> Layout:
    """The layout that a Hugging Face model was prepared for, see :mod:`agentrl.train.row_attention`."""
    span = attention_span(model.config.get_text_config().hidden_size)
    return Packed(span) if is_packed(model) else Padded(span)


class Padded:
    """Rows padded to the longest, with a dense mask.

    Args:
        span: Row length at which dense attention costs as much as all else.
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
        ends = np.full((count, length), length, np.int64)  # padding is seen by padding only
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
    """Rows laid end to end in one, with attention that computes only what each token may see.

    Args:
        span: Row length at which dense attention would cost as much as all else.
        blocks: A mask of blocks for ``flex_attention``, by default on CUDA; tiles for our own attention elsewhere.
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
        """See :class:`Layout`; what is left of the last block is filled with tokens that see themselves only.

        On a CPU the length is a round one, so that memory of the same sizes is asked for again and again: what is free
        in between would not fit otherwise.
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
        """The attention mask that ``ends`` of all nodes stand for, as blocks or as tiles."""
        return block_mask(ends) if blocks else TreeTiles(ends)


def collate(
    rows: Sequence[Row], branches: Sequence[Branch], tokens: TokenColumns, layout: Layout, device: torch.device
) -> MicroBatch:
    """The tensors of a micro-batch's rows."""
    return layout.tensors([lay_out(row, branches, tokens) for row in rows], tokens, device)
