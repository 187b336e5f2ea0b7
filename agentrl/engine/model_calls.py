"""Calls a model's own forward pass, with a cache of transformers' own or without one."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.models.decoder import decoder_of
from agentrl.models.own_head import OwnHead
from agentrl.models.pixels import embedded_as

DELTAS = "rope_deltas"  # of models whose positions depend on images: how far the next position is from the next place


class ModelCalls:
    """Calls a model with a cache of its own, or without one.

    Args:
        model: A causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        known = inspect.signature(model.forward).parameters
        self._caches = "cache" in known
        self._keeps = "logits_to_keep" in known
        self._placed = [module for module in model.modules() if hasattr(module, DELTAS)]

    def with_cache(
        self, tokens: Tensor, cache: Any, keep: int, images: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        """Computes the logits of the last ``keep`` of ``[rows, tokens]`` tokens behind a cache.

        Args:
            tokens: int64 ``[rows, tokens]``.
            cache: Cache of what is before; ``None`` for nothing.
            keep: Number of tokens whose logits are wanted.
            images: Arguments of :meth:`~agentrl.models.pixels.Pixels.arguments`, for a prompt with images.

        Returns:
            ``[rows, keep, vocab]``, and the cache with the new tokens.

        Raises:
            ValueError: The model has no cache.
        """
        if not self._caches:
            raise ValueError("its forward pass takes no cache")
        cache = new_cache(self.model) if cache is None else cache
        how: dict[str, Any] = {"logits_to_keep": keep} if self._keeps else {}
        for module in self._placed:  # the model keeps them of its latest prompt; ours are those of each cache
            setattr(module, DELTAS, getattr(cache, DELTAS, None))
        with embedded_as(self.model, tokens, images or {}) as inputs:
            out = self.model(use_cache=True, cache=cache, **inputs, **how)
        for module in self._placed:
            setattr(cache, DELTAS, getattr(module, DELTAS))
        return out.logits[:, -keep:], cache

    def without_cache(self, rows: Sequence[Sequence[int]], keep: Sequence[int]) -> Tensor:
        """Computes the logits after the last tokens of whole sequences.

        Args:
            rows: Ids of each sequence.
            keep: Number of last tokens of each whose logits are wanted.

        Returns:
            ``[sum of keep, vocab]``.
        """
        longest = max(map(len, rows))
        device = next(self.model.parameters()).device
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        states = decoder_of(self.model)(input_ids=ids, use_cache=False).last_hidden_state
        wanted = [states[i, len(row) - count : len(row)] for i, (row, count) in enumerate(zip(rows, keep, strict=True))]
        return OwnHead(self.model)(torch.cat(wanted))


def new_cache(model: Any) -> Any:
    """Makes an empty cache with the kinds of layers that the model's config names."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)
