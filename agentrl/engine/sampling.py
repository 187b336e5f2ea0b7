"""Samples one token per row from float32 logits, exactly.

Guarantees: a plain row's token follows softmax(logits / T) over the whole vocabulary, down to probabilities of 1e-15
(one double-precision uniform per token; float32 uniforms cannot reach below 6e-8). The logprob is always
log_softmax(logits / T) of the sampled id over the whole vocabulary, also where top_p, top_k, min_p or banned ids kept
tokens from being sampled; greedy rows report it at temperature 1. A row with a logit that is NaN, or without any
finite logit, is reported as broken, not sampled.

How: exponentials are summed in blocks, the block is found in a double-precision cumulative sum over blocks, then the
token inside it; no sort and no pass over the vocabulary in double. Only truncated rows are sorted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.engine.native.library import Native
from agentrl.engine.request import Request

BLOCK = 128  # 49,152 logits make 384 blocks: both levels of the search stay short


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens, one per row.

    Attributes:
        tokens: Sampled ids, [rows].
        logprobs: Logprobs of the sampled ids, [rows].
        broken: Rows whose logits are not usable.
    """

    tokens: list[int]
    logprobs: list[float]
    broken: list[int]


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request], native: Native | None = None) -> Sampled:
    """Sample the next token of each request.

    Args:
        logits: Raw logits, float32 [rows, vocab]; overwritten.
        requests: The request of each row; each row takes exactly one number from its own random stream.
        native: Compiled operators, which draw where no row is truncated or has banned ids: from the same number the
            same token, but for rounding.

    Returns:
        Tokens, logprobs and broken rows.
    """
    temperatures = [1.0 if request.params.greedy else request.params.temperature for request in requests]
    uniforms = torch.tensor([request.rng.random() for request in requests], dtype=torch.float64, device=logits.device)
    if native is not None and not any(request.params.truncated or request.banned for request in requests):
        greedy = torch.tensor([request.params.greedy for request in requests])
        warm = torch.tensor(temperatures, dtype=torch.float32).clamp_min(1e-6)
        tokens, logprobs, broken = native.sample(logits, warm, greedy, uniforms)
        return Sampled(tokens.tolist(), logprobs.tolist(), broken.nonzero().flatten().tolist())
    if any(temperature != 1.0 for temperature in temperatures):
        logits /= torch.tensor(temperatures, device=logits.device).clamp_min(1e-6)[:, None]
    top = logits.amax(-1, keepdim=True)
    weights = _blocks((logits - top).exp_())
    sums = weights.sum(-1).double()  # [rows, blocks]
    total = sums.sum(-1)
    banned = _ban(weights, sums, requests)
    tokens = _draw(weights, sums, uniforms)
    flat = weights.flatten(1)
    for row, request in enumerate(requests):
        if request.params.greedy:
            tokens[row] = flat[row].argmax()
    rows = [row for row, request in enumerate(requests) if request.params.truncated]
    if rows:
        probabilities = flat[rows] / (sums.sum(-1) if banned else total)[rows, None]
        tokens[rows] = _draw_truncated(probabilities, [requests[row] for row in rows], uniforms[rows])
    tokens.clamp_max_(logits.shape[-1] - 1)  # only a broken row can point into the padding
    chosen = logits.gather(-1, tokens[:, None]).double()
    logprobs = (chosen - top).squeeze(-1) - total.log()
    broken = (~torch.isfinite(total)).nonzero().flatten().tolist()
    return Sampled(tokens.tolist(), logprobs.tolist(), broken)


def _blocks(weights: Tensor) -> Tensor:
    """[rows, vocab] as [rows, blocks, BLOCK], padded with zeros."""
    short = -weights.shape[-1] % BLOCK
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    return weights.view(weights.shape[0], -1, BLOCK)


def _ban(weights: Tensor, sums: Tensor, requests: Sequence[Request]) -> bool:
    """Set the weights of banned ids to zero, in place; returns whether there were any."""
    changed = False
    for row, request in enumerate(requests):
        if request.banned:
            weights[row].view(-1)[list(request.banned)] = 0
            sums[row] = weights[row].sum(-1).double()
            changed = True
    return changed


def _draw(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse of the cumulative distribution.

    Args:
        weights: Unnormalised probabilities, float32 [rows, blocks, BLOCK].
        sums: Block sums of the weights, float64 [rows, blocks].
        uniforms: float64 [rows] in [0, 1).

    Returns:
        Token ids, int64 [rows].
    """
    cumulative = sums.cumsum(-1)
    target = (uniforms * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_max_(_last_positive(sums))
    before = (cumulative.gather(-1, block) - sums.gather(-1, block)).clamp_min_(0)
    # The place inside the block is a fraction of it, so float32 block sums cost no token its chance.
    fraction = ((target - before) / sums.gather(-1, block)).clamp_(0, 1)
    inside = weights[torch.arange(len(weights), device=weights.device), block[:, 0]].double()
    within = inside.cumsum(-1)
    index = torch.searchsorted(within, fraction * within[:, -1:], right=True).clamp_max_(_last_positive(inside))
    return (block * BLOCK + index).squeeze(-1)


def _last_positive(values: Tensor) -> Tensor:
    """Index of the last entry above zero, [rows, 1]; rounding must not step past it."""
    return values.shape[-1] - 1 - (values > 0).flip(-1).int().argmax(-1, keepdim=True)


def _draw_truncated(probabilities: Tensor, requests: Sequence[Request], uniforms: Tensor) -> Tensor:
    """Sample rows with top_k, top_p or min_p; each bound applies to the untruncated distribution, like SGLang's.

    Args:
        probabilities: float32 [rows, padded vocab].
        requests: The request of each row.
        uniforms: float64 [rows] in [0, 1).

    Returns:
        Token ids, int64 [rows].
    """
    device, width = probabilities.device, probabilities.shape[-1]
    top_k = torch.tensor([r.params.top_k if r.params.top_k > 0 else width for r in requests], device=device)
    top_p = torch.tensor([r.params.top_p for r in requests], dtype=torch.float64, device=device)
    min_p = torch.tensor([r.params.min_p for r in requests], device=device)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.double().cumsum(-1)
    keep = torch.arange(width, device=device) < top_k[:, None]
    keep &= (cumulative - ordered < top_p[:, None]) | (top_p[:, None] >= 1)
    keep &= ordered >= min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    mass = (ordered * keep).double().cumsum(-1)
    index = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)
    return order.gather(-1, index.clamp_max_(_last_positive(ordered * keep))).squeeze(-1)
