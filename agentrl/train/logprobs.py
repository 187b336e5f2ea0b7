"""Log-probabilities and entropies of given tokens without a full ``[tokens, vocab]`` tensor.

Guarantees: at most ``chunk`` rows of logits exist at one time, forward and backward; results equal a plain
``log_softmax(hidden @ weight.T / temperature)`` in the dtype of the product, with the softmax in float32. The chunk
size changes nothing but memory.
"""

from typing import Any

import torch
from torch import Tensor


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the log-normaliser of each token; the backward pass recomputes one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        logprobs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalizers = torch.empty_like(logprobs)
        room = _room(2, min(chunk, tokens), weight)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature, room[0])
            top = logits.amax(-1, keepdim=True)
            logits.sub_(top)
            exponentials = torch.exp(logits, out=room[1, : len(logits)])
            total = exponentials.sum(-1)
            normalizer = total.log()
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer
            entropies[part] = normalizer - torch.linalg.vecdot(exponentials, logits) / total
            normalizers[part] = normalizer + top.squeeze(-1)
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizers)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        room = _room(1, min(ctx.chunk, hidden.shape[0]), weight)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, ctx.temperature, room[0])
            upstream = grad_logprobs[part] / ctx.temperature
            all_logprobs = logits.sub_(normalizers[part, None])
            if grad_entropies is None:
                grad_logits = all_logprobs.exp_().mul_(-upstream[:, None])
            else:  # d entropy / d logit = -p (log p + entropy) / T
                scale = (grad_entropies[part] / ctx.temperature)[:, None]
                grad_logits = (all_logprobs + entropies[part, None]).mul_(scale).add_(upstream[:, None])
                grad_logits.mul_(all_logprobs.exp_()).neg_()
            rows = torch.arange(grad_logits.shape[0], device=hidden.device)
            grad_logits[rows, targets[part]] += upstream
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None


def _room(count: int, rows: int, weight: Tensor) -> Tensor:
    """``[count, rows, vocab]`` float32 for all chunks: memory taken anew for each costs as much as its arithmetic."""
    return torch.empty(count, rows, weight.shape[0], dtype=torch.float32, device=weight.device)


def _logits(hidden: Tensor, weight: Tensor, temperature: float, room: Tensor) -> Tensor:
    """``[rows, vocab]`` in float32, in ``room``."""
    logits = room[: len(hidden)]
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(hidden @ weight.t())
    return logits if temperature == 1.0 else logits.div_(temperature)


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``, and the entropy.

    Args:
        hidden: ``[tokens, hidden]`` states that predict the targets.
        weight: ``[vocab, hidden]`` of the output head.
        targets: ``[tokens]`` ids.
        temperature: Sampling temperature; must be positive.
        chunk: Rows of logits in memory at one time.

    Returns:
        ``[tokens]`` float32 log-probabilities and ``[tokens]`` float32 entropies, in nats; both are differentiable.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive: at 0 there is no distribution to differentiate")
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)  # type: ignore[return-value]
