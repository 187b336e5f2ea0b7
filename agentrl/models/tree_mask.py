"""The attention mask of a :class:`~agentrl.models.prefix_tree.PrefixTree`."""

import torch
from torch import Tensor


def tree_mask(ends: Tensor) -> Tensor:
    """Who may attend to whom.

    Args:
        ends: int64 ``[trees, length]``, index after each node's last descendant.

    Returns:
        True where a query (third axis) may see a key (last axis): ``[trees, 1, length, length]``.
    """
    nodes = torch.arange(ends.shape[1], device=ends.device)
    return ((nodes[None, :, None] < ends[:, None, :]) & (nodes[None, None, :] <= nodes[None, :, None]))[:, None]
