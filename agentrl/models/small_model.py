"""Makes small random models of a given config: the same classes and kinds of layers, with tiny widths.

Guarantees: what decides how a model computes (its class, kinds of layers, windows, biases, scaling and soft-capping) is
that of the config; every parameter is random, biases too, so that no part of the model is without effect.
"""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from agentrl.models.auto_class import auto_class, is_brought, makes_model

log = logging.getLogger(__name__)
VOCABULARY = 512
MOST_PARAMETERS = 300_000_000  # of a small model; a larger one takes seconds
UNFIT = (
    TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, AssertionError, ImportError,
    StrictDataclassError,
)  # fmt: skip
"""Exceptions of a class for a config whose sizes it does not accept."""

SHORT = 4  # tokens of a window or a chunk that is cut
_INNER, _HEAD, _ROTATED, _MOST_EXPERTS, _LAYERS = 64, 16, 8, 4, 2
_SPREAD = 0.2  # standard deviation of random weights: large enough for logits of several nats
_BIAS = 0.05  # standard deviation that is added to every parameter, since biases start at 0
_MOST = {  # largest value of a size, by its name in configs
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size",
            "shared_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size_mlp",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "rotary_dim", "state_size",
            "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_state",
            "mamba_dt_rank", "time_step_rank", "hidden_size_per_layer_input", "laurel_rank",
        ),
        _HEAD,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _MOST_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "linear_num_key_heads"), 2),
    "index_n_heads": 8,  # with few, whose scores are rectified, several tokens have the score 0, and any is as good
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "linear_num_value_heads": 4, "linear_num_heads": 4, "qk_rope_head_dim": _ROTATED,
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip


def small_configs(config: Any) -> Iterator[Any]:
    """Yields smaller copies of a model's config, the smallest first.

    The first is small in all sizes that are known here. Some classes do not accept it, because one of their other
    sizes depends on these; then the second is for them, in which only the number of layers and the vocabulary are.
    Parts beside the text, of a model with images, have one layer.
    """
    text = config.get_text_config(decoder=True)
    for narrow in (True, False):
        try:
            small = _smaller(text, narrow=narrow)
            yield small if text is config else _with_text(config, small)
        except UNFIT as error:
            log.info("no small %s: %s: %s", type(config).__name__, type(error).__name__, error)


def _with_text(config: Any, small: Any) -> Any:
    """Copies the config of a model of more than text, with a small text part."""
    whole, text = copy.deepcopy(config), config.get_text_config(decoder=True)
    for name in type(config).sub_configs:
        part = getattr(config, name, None)
        if part is text:
            setattr(whole, name, small)
        elif part is not None:
            for key in _DEPTHS:
                if type(getattr(part, key, None)) is int:
                    setattr(getattr(whole, name), key, 1)
    return whole


_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers")  # names of the number of layers of other parts


def short_windows(model: Any, context: int) -> Any | None:
    """Makes a small random model of a model's class whose windows and chunks are :data:`SHORT` tokens long.

    Args:
        model: A causal language model.
        context: Longest sequence in tokens; windows that are not shorter stay as they are.

    Returns:
        The small model with the attention implementation of ``model``; ``None`` if no small config is accepted.
    """
    text = model.config.get_text_config(decoder=True)
    for config in small_configs(text if makes_model(text) else model.config):
        small_text = config.get_text_config(decoder=True)
        for name, value in windows_of(small_text).items():
            setattr(small_text, name, SHORT if value < context else value)
        config._attn_implementation = text._attn_implementation
        small = fitting_model(config)
        if small is not None:
            return small.eval()
    return None


def windows_of(config: Any) -> dict[str, int]:
    """Returns the entries of a config that bound how far a layer sees, in tokens, by name."""
    names = (name for name in config.to_dict() if any(part in name for part in _REACH))
    values = {name: getattr(config, name, None) for name in names if "layers" not in name}
    used = {name: value for name, value in values.items() if type(value) is int and value > 0}
    if not getattr(config, "use_sliding_window", True):
        used.pop("sliding_window", None)
    return {name: value for name, value in used.items() if name not in _NO_REACH}


_REACH = ("window", "local_attention", "chunk", "floor_scale")  # in the names of such entries
_NO_REACH = ("chunk_size_feed_forward", "chunk_size", "mamba_chunk_size")  # of computations, which change no result


def fitting_model(config: Any) -> Any | None:
    """Makes the random model of a small config; ``None`` if its class does not accept it or it is too large."""
    try:
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in random_model(config).parameters()) > MOST_PARAMETERS:
                return None
        with torch.enable_grad():
            model = random_model(config)
            model(input_ids=torch.arange(2 * SHORT)[None], use_cache=False).logits.sum().backward()
    except UNFIT as error:
        log.info("a small %s does not fit: %s: %s", type(config).__name__, type(error).__name__, error)
        return None
    model.zero_grad()
    return model


def random_model(config: Any, seed: int = 0) -> Any:
    """Makes a causal language model with random parameters in float32.

    Args:
        config: One of :func:`small_configs`.
        seed: Seed of the parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        how = {"dtype": torch.float32, "trust_remote_code": is_brought(config)}
        model = auto_class(config).from_config(config, **how)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=_BIAS)
    return model


def _smaller(config: Any, *, narrow: bool) -> Any:
    values = copy.deepcopy(config.to_dict())
    names = {own: general for general, own in getattr(type(config), "attribute_map", {}).items()}
    values = {names.get(key, key): value for key, value in values.items()}  # by their general names
    _cut_layers(config, values)
    values["vocab_size"] = min(values["vocab_size"], VOCABULARY)
    if narrow:
        _narrow(values)
    values["bos_token_id"] = values["eos_token_id"] = 0
    values |= {name: _SPREAD for name in ("initializer_range", "init_std") if name in values}
    own = {general: name for name, general in names.items()}
    try:
        return _made(type(config), values | {"pad_token_id": None}, own)  # an id beyond the vocabulary would be refused
    except StrictDataclassError:  # a class that wants one
        return _made(type(config), values | {"pad_token_id": 0}, own)


def _made(kind: Any, values: dict[str, Any], own: dict[str, str]) -> Any:
    """Makes a config of a class from values by their general names."""
    return kind.from_dict({own.get(key, key): value for key, value in values.items()})


def _cut_layers(config: Any, values: dict[str, Any]) -> None:
    """Leaves the first layers, as many as are needed to have one of each kind."""
    count = values["num_hidden_layers"]
    lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == count}
    kinds = [lists, *({name: getattr(config, name, None)} for name in ("layer_types", "layers_block_type"))]
    seen = [value for some in kinds for value in some.values() if isinstance(value, (list, tuple))]
    layers = list(zip(*seen, strict=False)) or [()] * count
    layers = [tuple(map(str, one)) for one in layers]
    kept = max([_LAYERS, *(layers.index(kind) + 1 for kind in set(layers))])
    if values.get("num_kv_shared_layers"):  # the last layers take the keys of earlier ones
        values["num_kv_shared_layers"], kept = kept, 2 * kept
    kept = min(kept, count)
    values |= {key: value[:kept] for key, value in lists.items()}
    values["num_hidden_layers"] = kept


def _narrow(values: dict[str, Any]) -> None:
    """Makes the widths of a config small, in place."""
    latent = bool(values.get("kv_lora_rank"))
    rotated = values.get("head_dim") == values.get("qk_rope_head_dim") if latent else False
    for name, most in _MOST.items():
        if type(values.get(name)) is int:
            values[name] = min(values[name], most)
    heads = values.get("num_attention_heads")
    before = values.get("head_dim") or (values["hidden_size"] // heads if heads and values.get("hidden_size") else 0)
    if type(heads) is int:
        shared = values.get("num_key_value_heads")
        groups = max(1, heads // shared) if shared else 1
        values["num_attention_heads"] = heads = min(heads, 2 * groups)
        if shared:
            values["num_key_value_heads"] = max(1, heads // groups)
    if type(values.get("head_dim")) is int:
        values["head_dim"] = _ROTATED if rotated else _HEAD
    values["hidden_size"] = width = (heads or 4) * _HEAD
    if before:
        _narrow_rotation(values, before)
    for name in ("word_embed_proj_dim", "attention_hidden_size", "lru_width", "conv_dim", "conv_dim_out"):
        if values.get(name):
            values[name] = width
    _narrow_states(values, width)


def _narrow_rotation(values: dict[str, Any], before: int) -> None:
    """Makes the parts of a rotation by several axes (time, height, width of images) as small as the heads."""
    for rotation in (values.get("rope_parameters"), values.get("rope_scaling")):
        parts = rotation.get("mrope_section") if isinstance(rotation, dict) else None
        if rotation and parts:
            small = [max(1, part * _HEAD // before) for part in parts]
            small[0] += sum(parts) * _HEAD // before - sum(small)
            rotation["mrope_section"] = small


def _narrow_states(values: dict[str, Any], width: int) -> None:
    """Makes the heads of state-space layers fit the hidden size."""
    inner = width * int(values.get("mamba_expand") or values.get("expand") or 1)
    for heads, size in (
        ("mamba_n_heads", "mamba_d_head"),
        ("num_heads", "head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ):
        if values.get(heads) and values.get(size) and ("mamba" in size or "expand" in values):
            values[size], values[heads] = _HEAD, inner // _HEAD
    for name in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
        if values.get(name):
            values[name] = 1
    if values.get("mamba_d_ssm"):
        values["mamba_d_ssm"] = inner
