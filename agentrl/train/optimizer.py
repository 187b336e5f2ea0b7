"""Makes the optimizer and applies gradients.

Guarantees: gradients are clipped by their global norm, which is right up to the largest float32; with a gradient that
is not finite the parameters do not change.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
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
    """Clips the gradients, steps the optimizer if they are finite, and clears them; a collective.

    Returns:
        The norm before clipping.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm(gradients)
    value = _number(norm)
    if math.isfinite(value):
        clip_grads_with_norm_(parameters, max_norm, norm)
    else:
        value = _clip_large(gradients, max_norm)
    if math.isfinite(value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def _clip_large(gradients: Sequence[Tensor], max_norm: float) -> float:
    """Clips gradients whose squares overflow, and returns their norm; a collective.

    They are divided by their largest element first: the factor to ``max_norm`` alone can be too small for float32.
    """
    largest = _largest(gradients)
    if not math.isfinite(largest):
        return largest
    for gradient in gradients:
        gradient.div_(largest)
    norm = _number(get_total_norm(gradients))
    for gradient in gradients:
        gradient.mul_(min(max_norm / norm, largest))
    return norm * largest


def _largest(gradients: Sequence[Tensor]) -> float:
    """Returns the largest absolute value of an element on any rank, infinity if one is not a number; a collective.

    ``torch.linalg.vector_norm`` of infinite order refuses the empty shard that a rank can have of a small parameter.
    """
    shards = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    found = torch.stack([one.abs().max() for one in shards if one.numel()] or [shards[0].new_zeros(())])
    largest = found.nan_to_num(nan=math.inf, posinf=math.inf).max()
    if any(isinstance(one, DTensor) for one in gradients):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _number(norm: Tensor) -> float:
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
