"""Log-probabilities and entropies of given tokens without a full ``[tokens, vocab]`` tensor.

Guarantees: at most ``chunk`` rows of logits exist at one time, forward and backward; results equal a plain
``log_softmax(hidden @ weight.T / temperature)`` in the dtype of the product, with the softmax in float32. The chunk
size changes nothing but memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 32  # rows of logits that stay in a CPU's cache from one operator to the next


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
        room = _room(min(chunk, tokens), weight)
        block = _room(_block(min(chunk, tokens), weight), weight)
        for start in range(0, tokens, chunk):
            chunk_logits = _logits(hidden[start : start + chunk], weight, temperature, room)
            for part, logits in _blocks(start, chunk_logits):
                top = logits.amax(-1, keepdim=True)
                logits.sub_(top)
                exponentials = torch.exp(logits, out=block[: len(logits)])
                total = exponentials.sum(-1)
                normalizer = total.log()
                logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer
                entropies[part] = normalizer - exponentials.mul_(logits).sum(-1) / total
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
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        upstream = grad_logprobs / ctx.temperature
        rows = min(ctx.chunk, hidden.shape[0])
        room = _room(rows, weight)
        block = _room(_block(rows, weight), weight) if grad_entropies is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            whole = slice(start, start + ctx.chunk)
            grad_logits = _logits(hidden[whole], weight, ctx.temperature, room)
            for part, logits in _blocks(start, grad_logits):
                logits.sub_(normalizers[part, None])  # now logprobs
                if block is None or grad_entropies is None:
                    logits.exp_().mul_(-upstream[part, None])
                else:  # d entropy / d logit = -p (log p + entropy) / T
                    scale = (grad_entropies[part] / ctx.temperature)[:, None]
                    weighed = torch.add(logits, entropies[part, None], out=block[: len(logits)])
                    weighed.mul_(scale).add_(upstream[part, None])
                    logits.exp_().mul_(weighed).neg_()
                logits.scatter_add_(-1, targets[part, None], upstream[part, None])
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[whole])
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[whole])
        return grad_hidden, grad_weight, None, None, None


def _room(rows: int, weight: Tensor) -> Tensor:
    """``[rows, vocab]`` float32 for all chunks: memory taken anew for each costs as much as its arithmetic."""
    return torch.empty(rows, weight.shape[0], dtype=torch.float32, device=weight.device)


def _blocks(start: int, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A chunk that begins at row ``start`` in parts: which rows of all, and their logits."""
    block = _block(len(logits), logits)
    for first in range(0, len(logits), block):
        part = logits[first : first + block]
        yield slice(start + first, start + first + len(part)), part


def _block(rows: int, beside: Tensor) -> int:
    """Rows of a chunk that are worked on together."""
    return min(BLOCK, rows) if beside.device.type == "cpu" else rows


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
