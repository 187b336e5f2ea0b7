"""Tiny models of many classes, with every probability of dropout that their configs know."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BioGptConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.auto import AutoModelForCausalLM

P = 0.3
_NEW: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GQA: dict[str, Any] = {**_NEW, "num_key_value_heads": 2, "attention_dropout": P}
_OLD: dict[str, Any] = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
    "attn_pdrop": P, "embd_pdrop": P, "resid_pdrop": P, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HIDDEN: dict[str, Any] = {"attention_dropout": P, "hidden_dropout": P}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**_OLD),
    "bigcode": GPTBigCodeConfig(**_OLD),
    "gptj": GPTJConfig(**_OLD, rotary_dim=8),
    "opt": OPTConfig(
        **{**_NEW, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
        dropout=P, attention_dropout=P, layerdrop=P,
    ),
    "biogpt": BioGptConfig(**_NEW, hidden_dropout_prob=P, attention_probs_dropout_prob=P, layerdrop=P),
    "phi": PhiConfig(**_NEW, resid_pdrop=P, embd_pdrop=P, attention_dropout=P),
    "phi3": Phi3Config(**_GQA, resid_pdrop=P, embd_pdrop=P, original_max_position_embeddings=64),
    "neox": GPTNeoXConfig(**_NEW, **_HIDDEN),
    "falcon": FalconConfig(**_NEW, **_HIDDEN),
    "persimmon": PersimmonConfig(**_NEW, **_HIDDEN),
    "stablelm": StableLmConfig(**_GQA, hidden_dropout=P),
    "starcoder2": Starcoder2Config(**_GQA, residual_dropout=P, embedding_dropout=P),
    "llama": LlamaConfig(**_GQA),
    "qwen3": Qwen3Config(**_GQA, head_dim=8),
    "mixtral": MixtralConfig(**_GQA, router_jitter_noise=P, num_local_experts=4),
}  # fmt: skip


def write_model(name: str, folder: Path) -> Path:
    """Writes a random model of a class, and returns its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder
