"""The tensors that one forward pass takes, and the trained tokens among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentrl.train.branches import TokenColumns
from agentrl.train.rows import RowArrays


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some rows, one below the other or end to end.

    Attributes:
        token_ids: ``[rows, length]``.
        positions: ``[rows, length]``.
        mask: ``[rows, 1, length, length]`` bool, true where a query may see a key; or that as blocks or tiles.
        sources: ``[distinct]`` flat index into ``rows * length`` of the state that predicts each target.
        targets: ``[distinct]`` token ids.
        trained: ``[trained]`` index into ``sources`` and ``targets`` of each trained token.
        places: ``[trained]`` index of each among the sampled tokens of the global batch.
        columns: ``[trained]`` what is known of each: ``weights``, ``sequences`` and ``turns``, and the columns of
            :class:`~agentrl.train.branches.TokenColumns`.
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor | BlockMask
    sources: Tensor
    targets: Tensor
    trained: Tensor
    places: Tensor
    columns: dict[str, Tensor]


@dataclass(frozen=True)
class TrainedTokens:
    """The part of a micro-batch that does not depend on how rows are laid out; as in :class:`MicroBatch`."""

    sources: Tensor
    targets: Tensor
    trained: Tensor
    places: Tensor
    columns: dict[str, Tensor]


def trained_tokens(
    rows: Sequence[RowArrays], firsts: Sequence[int], tokens: TokenColumns, device: torch.device
) -> TrainedTokens:
    """The trained tokens of some rows.

    Args:
        rows: Rows of a micro-batch.
        firsts: Flat index of each row's first node in the micro-batch.
        tokens: Columns that the rows' tokens are of.
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
