"""Attention over the slots for the leaner forward, sequence by sequence or row by row.

Guarantees: each query sees exactly its own sequence up to itself; nothing is padded in a prefill, and a decode step
pads no further than pays.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.inference.engine.batch import Decode, Prefill
from agentrl.inference.engine.slots import SlotCache


class PrefillAttention:
    """Of a batch of prompts.

    Args:
        cache: Slots.
        batch: What comes.
    """

    def __init__(self, cache: SlotCache, batch: Prefill) -> None:
        """Make the masks, which all layers share."""
        self._cache, self._batch = cache, batch
        self._masks = [_causal(run.count, run.length, batch.tokens.device) for run in batch.runs]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store keys and values, and attend.

        Args:
            layer: Which one.
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``.
            value: ``[tokens, kv_heads, head_dim]``.
            scale: Of the scores.

        Returns:
            ``[tokens, heads * head_dim]``.
        """
        batch, cache = self._batch, self._cache
        nodes = batch.write_tokens
        cache.write(layer, batch.write_slots, batch.write_positions, key[nodes], value[nodes])
        keys, values = cache.keys(layer), cache.values(layer)
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
    """True where one of the last ``count`` positions may see one of ``length``; ``None`` where SDPA needs no mask."""
    if count in (0, 1, length):
        return None
    return torch.ones(count, length, dtype=torch.bool, device=device).tril_(length - count)


class DecodeAttention:
    """Of one token per row.

    Args:
        cache: Slots.
        batch: What comes.
    """

    def __init__(self, cache: SlotCache, batch: Decode) -> None:
        """Nothing to prepare."""
        self._cache, self._batch = cache, batch
        self._mask = batch.mask[:, None, None]
        rows = batch.rows.tolist() if batch.rows is not None else None
        self._alone = [(row, rows[row] if rows else row, batch.lengths[row]) for row in batch.alone]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As :meth:`PrefillAttention.__call__`, with a token per row."""
        batch, cache = self._batch, self._cache
        if batch.write_tokens is not None:
            key, value = key[batch.write_tokens], value[batch.write_tokens]
        cache.write(layer, batch.write_slots, batch.write_positions, key, value)
        keys, values = cache.keys(layer), cache.values(layer)
        rows, kv_heads = len(query), keys.shape[1]
        folded = query.view(rows, kv_heads, -1, query.shape[-1])  # query heads that share keys are one matrix
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
