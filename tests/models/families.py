"""Every decoder family of transformers in miniature: random weights, windows and chunks of four tokens.

The list of families is transformers' own mapping of `AutoModelForCausalLM`; what is left out of it stands in
`EXCEPTIONS` with its reason. A config takes those sizes of `SMALL` that its class knows, and its own of `OWN`.
"""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from agentrl.models.auto_class import auto_class

SMALL: dict[str, Any] = {
    "vocab_size": 64, "unpadded_vocab_size": 64,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attention_chunk_size": 4, "original_max_position_embeddings": 128, "layer_types": None,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "n_inner": 48, "rotary_dim": 8, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2, "num_dense_layers": 1,
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_topk": 3, "index_head_dim": 8, "index_n_heads": 8, "mlp_layer_types": None,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1,
    "mamba_d_ssm": 64, "mamba_dt_rank": 4, "state_size": 8, "chunk_size": 4, "n_groups": 1, "num_heads": 8,
    "time_step_rank": 4, "expand": 2, "lru_width": 32, "attention_window_size": 4, "attention_hidden_size": 32,
    "context_length": 128, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2, "laurel_rank": 8, "shared_intermediate_size": 16, "conv_dim": 32, "conv_dim_out": 32,
    "block_ff_dim": 48,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARING: dict[str, Any] = {  # the last two layers take the keys of earlier ones
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # what a class needs beyond the sizes, mostly kinds of layers
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots3_note": {"num_key_value_heads": 4, "per_layer_config": {}},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n": _SHARING,
    "gemma3n_text": _SHARING,
    "gemma4": {"enable_moe_block": True, "top_k_experts": 2},  # gemma4_text is the dense one
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2},
    "minicpm3": {"dim_model_base": 32},
    "modernbert-decoder": {"local_attention": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    **{
        name: {"layer_types": ["linear_attention", "full_attention"]}
        for name in (
            "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid",
            "granitemoehybrid",
        )
    },
    "xlstm": {"num_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_headdim": 8,
    },
    **{
        name: {
            "layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 8, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
        }
        for name in ("qwen4_exp", "qwen4_exp_text")
    },
    "zaya": {"num_experts_per_tok": 1},
    **{
        name: {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
        for name in (
            "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_omni_text",
            "qwen3_omni_moe_text", "paddleocr_vl_text", "cosmos3_edge_text",
        )
    },
}  # fmt: skip
_ENCODER = "an encoder with a causal mask, of before decoders; its checkpoints do not generate"
_PART = "the decoder half of an encoder-decoder, which generates nothing without the other half"
_NO_TEXT = "of sounds or images: it has no text side that can be made alone"
EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta",
            "xlm-roberta-xl", "xmod",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
            "prophetnet", "trocr", "whisper",
        ),
        _PART,
    ),
    **dict.fromkeys(("emu3", "git", "mllama", "moshi", "musicgen", "musicgen_melody", "phi4_multimodal"), _NO_TEXT),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts tokens from another model's states"),
    "blt": "predicts bytes in patches, whose ends a second model chooses",
    "reformer": "hashes with random numbers: a logprob is not a function of the tokens",
}  # fmt: skip
SAMPLE = (  # characteristic families, which are tried each time
    "llama", "gpt2", "mixtral", "mistral", "gemma2", "gpt_oss", "llama4_text", "cohere", "phi", "mamba2", "qwen3_next",
    "jamba", "bloom",
)  # fmt: skip
SAMPLE_WITH_IMAGES = ("gemma3 whole", "qwen2_vl", "llava")
_LATER = "tokens of one sequence depend on another after it"
REFUSED: dict[str, str] = {  # families that cannot be trained, and the reason that is given
    "cpmant": _LATER,
    "xlnet": _LATER,
}
DRAWS = {  # whose weights are another draw than the first, and why
    "gemma4": 1,  # a tree's float32 is off by 1.2e-5 nats in the first, by at most 6.2e-6 in the next seven
}
UNSERVED = REFUSED  # families that the embedded engine cannot serve, and the reason that is given
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(EXCEPTIONS))


WHOLE = " whole"  # behind a family's name: the model with its parts for images, where the text part is one by itself
WITH_IMAGES = sorted(
    {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    | {name + WHOLE for name in FAMILIES if "ForConditionalGeneration" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}
)
SEEN: dict[str, Any] = {  # sizes of the parts for images and sounds, of which only the number of layers must be small
    "num_hidden_layers": 1, "depth": 1, "num_layers": 1, "n_layers": 1, "hidden_size": 32, "embed_dim": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_heads": 4, "image_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip


def small_config(name: str, other: Mapping[str, Any] | None = None) -> Any:
    """Makes the miniature config of a family, with ``other`` sizes: the text part of a composite one."""
    return _small_text(name, type(AutoConfig.for_model(name).get_text_config(decoder=True)), other or {})


def _small_text(name: str, kind: Any, other: Mapping[str, Any]) -> Any:
    known = set(inspect.signature(kind.__init__).parameters) | set(kind.attribute_map)
    sizes = {key: value for key, value in {**SMALL, **other}.items() if key in known and key not in kind.attribute_map}
    if "kv_lora_rank" in known:  # latent attention has as many key heads as query heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= OWN.get(name, {})
    return kind(**{key: value for key, value in sizes.items() if value is not None})


def small_config_with_images(name: str) -> Any:
    """Makes the miniature config of a family whose models take images too, with all its parts."""
    whole = AutoConfig.for_model(name.removesuffix(WHOLE))
    text = whole.get_text_config(decoder=True)
    parts: dict[str, Any] = {}
    for part in type(whole).sub_configs:
        config = getattr(whole, part, None)
        if config is text:
            parts[part] = _small_text(config.model_type, type(config), {})
        elif config is not None:
            known = set(inspect.signature(type(config).__init__).parameters) - set(type(config).attribute_map)
            parts[part] = type(config)(**{key: value for key, value in SEEN.items() if key in known})
    return type(whole)(**parts)


def small_model(name: str, seed: int | None = None) -> Any:
    """Makes a family's miniature model in float32, in evaluation mode; each parameter is random, biases too."""
    seed = DRAWS.get(name, 0) if seed is None else seed
    config = small_config(name) if name not in WITH_IMAGES else small_config_with_images(name)
    for part in (config, config.get_text_config(decoder=True)):
        for key in ("initializer_range", "init_std"):
            if hasattr(part, key):
                setattr(part, key, 0.2)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()
