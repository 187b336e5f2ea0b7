"""The attention mask of a :class:`~agentrl.models.prefix_tree.PrefixTree`."""

import torch
from torch import Tensor


def tree_mask(ends: Tensor) -> Tensor:
    """Makes the dense attention mask of prefix trees.

    Args:
        ends: int64 ``[trees, length]``, index after each node's last descendant.

    Returns:
        bool ``[trees, 1, length, length]``, true where a query (third axis) may attend to a key (last axis).
    """
    nodes = torch.arange(ends.shape[1], device=ends.device)
    return ((nodes[None, :, None] < ends[:, None, :]) & (nodes[None, None, :] <= nodes[None, :, None]))[:, None]
