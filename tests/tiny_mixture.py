"""A tiny random mixture of experts (Qwen 3 MoE) with the tokenizer of the tiny model, in Hugging Face's format."""

import json
from pathlib import Path

from tests.tiny import build_tiny_model


def build_tiny_mixture(folder: Path, seed: int = 0, hidden: int = 32, head_dim: int = 8) -> Path:
    """Write a two-layer model with four experts a layer, of which each token takes two.

    Args:
        folder: Folder to write to; created when missing.
        seed: Seed of the weights.
        hidden: Hidden size.
        head_dim: Size of a head.

    Returns:
        The folder.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    build_tiny_model(folder, seed=seed, hidden=hidden)
    config = json.loads((folder / "config.json").read_text())
    experts = Qwen3MoeConfig(
        vocab_size=config["vocab_size"], hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, intermediate_size=hidden, moe_intermediate_size=hidden // 2,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=512, initializer_range=0.1,
        eos_token_id=config["eos_token_id"], bos_token_id=config["bos_token_id"], pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(experts).float()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
        model.save_pretrained(folder)
    return folder
