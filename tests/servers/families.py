"""Decoder families in miniature, of sizes that SGLang and vLLM take on a CPU, with the tiny model's tokenizer."""

import warnings
from pathlib import Path

import torch

from agentrl.models.auto_class import auto_class
from tests.models.families import small_config
from tests.servers.conftest import HIDDEN
from tests.tiny import build_tiny_tokenizer

_SIZES = {  # heads of 64: vLLM has no smaller ones on a CPU
    "hidden_size": HIDDEN, "intermediate_size": 128, "head_dim": 64, "max_position_embeddings": 1024,
    "original_max_position_embeddings": 1024, "sliding_window": 16, "attention_chunk_size": 128, "ffn_dim": 128,
    "word_embed_proj_dim": HIDDEN, "n_embd": HIDDEN, "n_positions": 1024, "n_inner": 128, "rotary_dim": 64,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "shared_intermediate_size": 64,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "conv_dim": HIDDEN, "conv_dim_out": HIDDEN,
    "block_ff_dim": 128, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_d_ssm": 2 * HIDDEN,
}  # fmt: skip


def build_family(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes a family's model of random weights, biases and corrections of routers included, and a tokenizer.

    Args:
        name: Name of the family's config, as transformers has it.
        folder: Folder to write to; created when missing.
        seed: Seed of the weights; buffers are the same for each.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tiny_tokenizer(folder)
    tokens = {"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}
    vocabulary = {"vocab_size": len(tokenizer), "unpadded_vocab_size": len(tokenizer)}
    config = small_config(name, {**_SIZES, **ids, **vocabulary})
    config.initializer_range = 0.07
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
        torch.manual_seed(1000)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer), alpha=0.3)
        model.save_pretrained(folder)
    return folder
