"""Attention over the slots for the fast path, sequence by sequence or row by row.

Guarantees: each query sees exactly its own sequence up to itself; a prefill has no padding; a decode step pads only
where that is faster.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engine.forward_batch import Decode, Prefill
from agentrl.engine.slots import SlotCache

# (layer, queries, keys and values [tokens, heads + 2 * kv_heads, dim], scale) -> [tokens, heads * dim]
Attend = Callable[[int, Tensor, float], Tensor]


def parted(mixed: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a joint projection into views of queries, keys and values, each ``[tokens, heads of its kind, dim]``."""
    heads = mixed.shape[1] - 2 * kv_heads
    return mixed[:, :heads], mixed[:, heads:-kv_heads], mixed[:, -kv_heads:]


def rotated(mixed: Tensor, turn: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """Rotates the first ``heads`` of ``[tokens, all heads, dim]`` by cosines and sines ``[tokens, dim / 2]``."""
    cosine, sine = (part[:, None] for part in turn)
    first, second = mixed[:, :heads].chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return torch.cat((turned, mixed[:, heads:]), dim=1)


class PrefillAttention:
    """Attention of a batch of prompts.

    Args:
        cache: Keys and values of the slots.
        batch: Layout of the tokens to compute.
    """

    def __init__(self, cache: SlotCache, batch: Prefill) -> None:
        """Make the masks, which all layers share."""
        self._cache, self._batch = cache, batch
        self._masks = [_causal(run.count, run.length, batch.tokens.device) for run in batch.runs]

    def __call__(self, layer: int, mixed: Tensor, scale: float) -> Tensor:
        """Store keys and values, and attend.

        Args:
            layer: Index of the layer.
            mixed: Queries, keys and values, ``[tokens, heads + 2 * kv_heads, head_dim]``.
            scale: Factor on the attention scores.

        Returns:
            ``[tokens, heads * head_dim]``.
        """
        batch, cache = self._batch, self._cache
        keys, values = cache.keys(layer), cache.values(layer)
        query, key, value = parted(mixed, keys.shape[1])
        nodes = batch.write_tokens
        cache.write(layer, batch.write_slots, batch.write_positions, key[nodes], value[nodes])
        answer = torch.empty_like(query)
        for run, mask in zip(batch.runs, self._masks, strict=True):
            if run.count:
                tokens = slice(run.first, run.first + run.count)
                answer[tokens] = scaled_dot_product_attention(
                    query[None, tokens].transpose(1, 2),
                    keys[run.slot, None, :, : run.length],
                    values[run.slot, None, :, : run.length],
                    attn_mask=mask,
                    is_causal=mask is None and run.count > 1,
                    scale=scale,
                    enable_gqa=True,
                )[0].transpose(0, 1)
        return answer.reshape(len(query), -1)


def _causal(count: int, length: int, device: torch.device) -> Tensor | None:
    """Mask of the last ``count`` of ``length`` positions, True where visible; ``None`` where SDPA needs no mask."""
    if count in (0, 1, length):
        return None
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)


class DecodeAttention:
    """Attention of a decode step, one token per row.

    Args:
        cache: Slots.
        batch: Layout of the tokens to compute.
    """

    def __init__(self, cache: SlotCache, batch: Decode) -> None:
        """Remember cache and batch."""
        self._cache, self._batch = cache, batch
        self._mask = batch.mask[:, None, None]
        rows = batch.rows.tolist() if batch.rows is not None else None
        self._alone = [(row, rows[row] if rows else row, batch.lengths[row]) for row in batch.alone]

    def __call__(self, layer: int, mixed: Tensor, scale: float) -> Tensor:
        """Store keys and values, and attend, as :meth:`PrefillAttention.__call__` does, with one token per row."""
        batch, cache = self._batch, self._cache
        keys, values = cache.keys(layer), cache.values(layer)
        rows, kv_heads = len(mixed), keys.shape[1]
        query, key, value = parted(mixed, kv_heads)
        if batch.write_tokens is not None:
            key, value = key[batch.write_tokens], value[batch.write_tokens]
        cache.write(layer, batch.write_slots, batch.write_positions, key, value)
        folded = query.reshape(rows, kv_heads, -1, query.shape[-1])  # query heads that share keys are one matrix
        if batch.rows is None:
            seen_keys, seen_values = keys[:rows, :, : batch.view], values[:rows, :, : batch.view]
        else:
            seen_keys = keys[:, :, : batch.view].index_select(0, batch.rows)
            seen_values = values[:, :, : batch.view].index_select(0, batch.rows)
        answer = scaled_dot_product_attention(folded, seen_keys, seen_values, attn_mask=self._mask, scale=scale)
        for row, slot, length in self._alone:
            answer[row] = scaled_dot_product_attention(
                folded[row, None], keys[slot, None, :, :length], values[slot, None, :, :length], scale=scale
            )[0]
        return answer.reshape(rows, -1)
