"""Makes small random models of a given config: the same classes and kinds of layers, with tiny widths.

Guarantees: what decides how a model computes (its class, kinds of layers, windows, biases, scaling and soft-capping) is
that of the config; every parameter is random, biases too, so that no part of the model is without effect.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch

VOCABULARY = 512
MOST_PARAMETERS = 300_000_000  # of a small model; a larger one takes seconds
UNFIT = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError, ImportError)
"""What a class raises for a config whose sizes it does not accept."""

_WIDTHS = (
    "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEAD, _LARGEST_INNER, _MOST_EXPERTS, _LAYERS = 16, 64, 4, 2
_SPREAD = 0.2  # standard deviation of random weights: large enough for logits of several nats
SHORT = 4  # tokens of a window or a chunk that is cut
_BIAS = 0.05  # standard deviation that is added to every parameter, since biases start at 0


def small_configs(config: Any) -> Iterator[Any]:
    """Yields smaller copies of a text model's config, the smallest first.

    The first is small in all sizes that are known here. Some classes do not accept it, because one of their other
    sizes depends on these; then the second is for them, in which only the number of layers and the vocabulary are.
    """
    yield _fewer_layers(_narrow(copy.deepcopy(config)))
    yield _fewer_layers(copy.deepcopy(config))


def short_windows(model: Any) -> Any | None:
    """Makes a small random model of a model's class whose windows and chunks are :data:`SHORT` tokens long.

    Args:
        model: A causal language model.

    Returns:
        The small model with the attention implementation of ``model``; ``None`` if no small config is accepted.
    """
    for config in small_configs(model.config.get_text_config(decoder=True)):
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(config, name, None):
                setattr(config, name, SHORT)
        config._attn_implementation = model.config.get_text_config(decoder=True)._attn_implementation
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in random_model(config).parameters()) > MOST_PARAMETERS:
                continue
        try:
            small = random_model(config).eval()
            small(input_ids=torch.arange(SHORT)[None], use_cache=False)
        except UNFIT:
            continue
        return small
    return None


def random_model(config: Any, seed: int = 0) -> Any:
    """Makes a causal language model with random parameters in float32.

    Args:
        config: One of :func:`small_configs`.
        seed: Seed of the parameters.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=_BIAS)
    return model


def _fewer_layers(config: Any) -> Any:
    kinds = getattr(config, "layer_types", None)
    count = min(config.num_hidden_layers, _LAYERS)
    if kinds:
        chosen = list(dict.fromkeys(kinds))
        config.layer_types = chosen if len(chosen) > 1 else chosen * count
        count = len(config.layer_types)
    config.num_hidden_layers = count
    config.vocab_size = min(config.vocab_size, VOCABULARY)
    config.pad_token_id = None  # an id beyond the vocabulary would be refused
    config.bos_token_id = config.eos_token_id = 0
    for name in ("initializer_range", "init_std"):
        if hasattr(config, name):
            setattr(config, name, _SPREAD)
    return config


def _narrow(config: Any) -> Any:
    heads, shared = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    groups = max(1, heads // shared) if shared else 1
    config.num_attention_heads = min(heads, 2 * groups)
    if shared:
        config.num_key_value_heads = max(1, config.num_attention_heads // groups)
    if getattr(config, "head_dim", None) and "head_dim" in config.to_dict():
        config.head_dim = _HEAD
    config.hidden_size = config.num_attention_heads * _HEAD
    for name in _WIDTHS:
        if getattr(config, name, None):
            setattr(config, name, config.hidden_size if name == "word_embed_proj_dim" else _LARGEST_INNER)
    for name in _EXPERTS:
        if getattr(config, name, None):
            setattr(config, name, min(getattr(config, name), _MOST_EXPERTS))
    if getattr(config, "num_experts_per_tok", None):
        config.num_experts_per_tok = min(config.num_experts_per_tok, 2)
    return config
