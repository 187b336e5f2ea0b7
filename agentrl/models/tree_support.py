"""Reads from a model's config which layers do not attend to the whole past, and picks ids for trials.

Guarantees: nothing is decided by a list of classes; :mod:`agentrl.models.probe` tries what a config only names.
"""

from typing import Any

import torch


def limited_attention(config: Any, context: int) -> list[str]:
    """Returns the kinds of layers that do not attend to the whole past within ``context`` tokens.

    Args:
        config: Text config of a transformers model.
        context: Length of the longest sequence in tokens.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None and window and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    if window and context <= window:
        kinds.discard("sliding_attention")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and context <= chunk:
        kinds.discard("chunked_attention")
    return sorted(kinds - {"full_attention"})


def ids_of(model: Any, count: int) -> list[int]:
    """Returns ids from a model's whole vocabulary: on special tokens some models have too large activations."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return ((torch.arange(count) * 2 + 1) * vocabulary // (2 * count)).tolist()
