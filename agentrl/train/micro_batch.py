"""Micro-batches: the input tensors of one forward pass, and its trained tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.train.branches import TokenColumns
from agentrl.train.rows import RowArrays


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of the rows of one forward pass, padded or packed.

    A prediction (hidden state and target) that several trained tokens have in common is computed once.

    Attributes:
        token_ids: int64 ``[rows, length]``.
        positions: int64 ``[rows, length]``.
        mask: Attention mask of prefix trees: bool ``[rows, 1, length, length]``, true where a query may attend to a
            key; or the same as numbers to add, as a block mask or as tree tiles; or one of them for each kind of layer.
            ``None`` for plain rows, which get transformers' own masks.
        sources: int64 ``[distinct]`` flat index into ``rows * length`` of the hidden state of each distinct prediction.
        targets: int64 ``[distinct]`` target token id of each distinct prediction.
        trained: int64 ``[trained]`` index into ``sources`` and ``targets`` of each trained token.
        places: int64 ``[trained]`` index of each trained token in the global batch.
        columns: ``[trained]`` data of each trained token by name: ``weights``, ``sequences`` and ``turns``, and the
            sampled columns of :class:`~agentrl.train.branches.TokenColumns`.
        bounds: For packed plain rows, the arguments by which layers keep sequences apart; empty for others.
        pixels: The arguments that hold images, of :class:`~agentrl.models.pixels.Pixels`; empty without images.
        experts: int16 ``[rows * length, width]`` experts to replay, negative where a token's are not known; ``None``
            without any.
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor | BlockMask | dict[str, Any] | None
    sources: Tensor
    targets: Tensor
    trained: Tensor
    places: Tensor
    columns: dict[str, Tensor]
    bounds: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The decoder's arguments beside the tokens; none for padded plain rows: no token depends on later ones."""
        if self.mask is None:
            return self.bounds | self.pixels
        return {"position_ids": self.positions, "attention_mask": self.mask}


@dataclass(frozen=True)
class TrainedTokens:
    """The part of a :class:`MicroBatch` that does not depend on the layout of its rows; same attributes."""

    sources: Tensor
    targets: Tensor
    trained: Tensor
    places: Tensor
    columns: dict[str, Tensor]


def trained_tokens(
    rows: Sequence[RowArrays], firsts: Sequence[int], tokens: TokenColumns, device: torch.device
) -> TrainedTokens:
    """Makes the tensors of the trained tokens of some rows.

    Args:
        rows: Rows of a micro-batch.
        firsts: Flat index of each row's first node in the micro-batch.
        tokens: Token columns that the rows index.
        device: Device of the tensors.
    """

    def tensor(parts: list[NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts) if parts else np.empty(0)
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    distinct = np.cumsum([0, *(len(row.sources) for row in rows)])
    own = np.concatenate([row.own for row in rows]) if rows else np.empty(0, np.int64)
    columns = {name: torch.from_numpy(values[own]).to(device) for name, values in tokens.sampled.items()}
    columns["weights"] = tensor([row.weights for row in rows], torch.float32)
    columns["sequences"] = tensor([row.sequences for row in rows], torch.long)
    columns["turns"] = tensor([row.turns for row in rows], torch.long)
    return TrainedTokens(
        sources=tensor([row.sources + first for row, first in zip(rows, firsts, strict=True)], torch.long),
        targets=tensor([row.targets for row in rows], torch.long),
        trained=tensor([row.trained + first for row, first in zip(rows, distinct, strict=False)], torch.long),
        places=tensor([row.places for row in rows], torch.long),
        columns=columns,
    )
