"""The attention masks of a :class:`~agentrl.models.prefix_tree.PrefixTree`."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """How far back a layer's tokens see along their own branch.

    Attributes:
        window: Number of latest tokens that a token sees, itself included; ``None`` for all.
        chunk: Length of the parts of a sequence inside which tokens see each other; ``None`` for one part.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def limited(self) -> bool:
        """Whether some earlier tokens are out of reach."""
        return self.window is not None or self.chunk is not None

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether tokens at positions ``queries`` reach those at positions ``keys`` of their branch, elementwise."""
        seen = torch.ones(torch.broadcast_shapes(queries.shape, keys.shape), dtype=torch.bool, device=queries.device)
        if self.window is not None:
            seen = seen & (queries - keys < self.window)
        if self.chunk is not None:
            seen = seen & (queries // self.chunk == keys // self.chunk)
        return seen


def tree_mask(ends: Tensor, positions: Tensor | None = None, reach: Reach | None = None) -> Tensor:
    """Makes the dense attention mask of prefix trees.

    Args:
        ends: int64 ``[trees, length]``, index after each node's last descendant.
        positions: int64 ``[trees, length]``, depth of each node; needed for a limited reach.
        reach: How far tokens see along their branch; ``None`` for all of it.

    Returns:
        bool ``[trees, 1, length, length]``, true where a query (third axis) may attend to a key (last axis).
    """
    nodes = torch.arange(ends.shape[1], device=ends.device)
    seen = (nodes[None, :, None] < ends[:, None, :]) & (nodes[None, None, :] <= nodes[None, :, None])
    if reach is not None and reach.limited:
        assert positions is not None, "a limited reach is one of positions"
        seen &= reach.sees(positions[:, :, None], positions[:, None, :])
    return seen[:, None]


def added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes a mask that is added to the scores from one of what may be seen."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
