"""Makes the optimizer and applies gradients.

Guarantees: gradients are clipped by their global norm; with a non-finite norm the parameters do not change.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from agentrl.config.recipe import TrainerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig, learning_rate: float) -> AdamW:
    """Makes the recipe's AdamW over the parameters that are not frozen."""
    return AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def apply_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Clips the gradients, steps the optimizer if their norm is finite, and clears them; a collective.

    Returns:
        The norm before clipping.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    if math.isfinite(value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
