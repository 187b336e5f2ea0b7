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
    norm = _total_norm(gradients)
    value = norm.item()
    if math.isfinite(value):
        for together in _by_mesh(parameters):
            clip_grads_with_norm_(together, max_norm, norm)
    else:
        value = _clip_large(gradients, max_norm)
    if math.isfinite(value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the norm of all gradients; a collective.

    torch refuses gradients on several meshes together: with tensor parallelism matrices lie on another than norms do.
    """
    norms = [get_total_norm(together) for together in _by_mesh(gradients)]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def _by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divides parameters or gradients by the mesh that they lie on."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


def _clip_large(gradients: Sequence[Tensor], max_norm: float) -> float:
    """Clips gradients whose squares overflow, and returns their norm; a collective.

    They are divided by their largest element first: the factor to ``max_norm`` alone can be too small for float32.
    """
    largest = _largest(gradients)
    if not math.isfinite(largest):
        return largest
    for gradient in gradients:
        gradient.div_(largest)
    norm = _total_norm(gradients).item()
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


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
