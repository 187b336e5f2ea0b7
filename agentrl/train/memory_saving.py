"""Memory-saving layers: RMS norms and gated MLPs that keep fewer activations for the backward pass.

Guarantees: the same operations are rounded in the same order, so results equal the original layer's up to the last
bits; a module is replaced only if the replacement gives the same result on a trial input. A norm's float32 copy and the
products inside an MLP are not kept but computed again in the backward pass, which halves what a Llama layer keeps, at
no cost in time.
"""

import inspect
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

TRIAL_ROWS = 4  # tokens of a trial input
TOLERANCE = 1e-5  # largest difference, relative to the largest value of the trial's result


class _RMSNorm(torch.autograd.Function):
    """``weight * (x / rms(x))`` with the norm in float32; keeps ``x`` and one number per row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(states, weight, scale)
        return weight * (wide * scale).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        states, weight, scale = ctx.saved_tensors
        normal = states.float() * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal.to(states.dtype)).sum(tuple(range(grad.dim() - 1)))
        wide = (grad * weight).float()
        along = (wide * normal).mean(-1, keepdim=True)
        return wide.sub_(normal.mul_(along)).mul_(scale).to(states.dtype), grad_weight, None


class _GatedDown(torch.autograd.Function):
    """``(silu(gate) * up) @ weight.T``; keeps only the inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return silu(gate).mul_(up) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        activated = silu(gate)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = grad.flatten(0, -2).t() @ (activated * up).flatten(0, -2)
        inner = grad @ weight
        grad_up = activated.mul_(inner)
        return torch.ops.aten.silu_backward(inner.mul_(up), gate), grad_up, grad_weight


def _norm(module: Any, states: Tensor) -> Tensor:
    return _RMSNorm.apply(states, module.weight, module.variance_epsilon)  # type: ignore[return-value]


def _mlp(module: Any, states: Tensor) -> Tensor:
    gate, up = module.gate_proj(states), module.up_proj(states)
    return _GatedDown.apply(gate, up, module.down_proj.weight)  # type: ignore[return-value]


def use_memory_saving_layers(model: nn.Module, *, norms_only: bool = False) -> int:
    """Replaces the forward passes of a model's RMS norms and gated MLPs, in place, where the results are the same.

    Args:
        model: Any model, with its adapters if it has any; not compiled or sharded yet. Its weights may be on the meta
            device.
        norms_only: Whether MLPs stay as they are: they read the last projection's weight, which ranks may share.

    Returns:
        Number of modules that were replaced.
    """
    replaced = 0
    for module in model.modules():
        replacement = _replacement(module)
        if replacement is None or (norms_only and replacement.func is _mlp):
            continue
        if _same_results(module, replacement):
            module.forward = replacement
            replaced += 1
    return replaced


def _replacement(module: Any) -> partial[Tensor] | None:
    """Returns the memory-saving forward pass for a module, judged by its attributes; ``None`` if there is none."""
    if "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return None  # replaced already, a norm with a gate, an expert with its router's weights
    if isinstance(getattr(module, "weight", None), Tensor) and isinstance(
        getattr(module, "variance_epsilon", None), float
    ):
        return partial(_norm, module)
    down = getattr(module, "down_proj", None)  # with an adapter it is not an nn.Linear
    if type(down) is nn.Linear and down.bias is None and hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
        return partial(_mlp, module)
    return None


def _with_weights(module: Any) -> Any:
    """Returns a module without memory as a narrow one with random weights."""
    narrow = deepcopy(module)
    for name in ("gate_proj", "up_proj", "down_proj"):
        if (layer := getattr(narrow, name, None)) is not None:
            inner = layer.weight[:, :TRIAL_ROWS] if name == "down_proj" else layer.weight[:TRIAL_ROWS]
            layer.weight = nn.Parameter(inner)
            if layer.bias is not None and name != "down_proj":
                layer.bias = nn.Parameter(layer.bias[:TRIAL_ROWS])
    narrow.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in narrow.parameters():
        parameter.normal_(std=0.1, generator=generator)
    return narrow


@torch.no_grad()
def _same_results(module: Any, replacement: partial[Tensor]) -> bool:
    weight = module.weight if hasattr(module, "weight") else module.down_proj.weight
    if weight.is_meta:
        trial = _with_weights(module)
        return _same_results(trial, partial(replacement.func, trial))
    width = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TRIAL_ROWS, width, generator=generator).to(weight)
    own, found = module(states), replacement(states)
    return own.shape == found.shape and bool((own - found).abs().max() <= TOLERANCE * own.abs().max())
