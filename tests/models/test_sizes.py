"""Counts of parameters and operations, against transformers' own models and formulas written out by hand."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from agentrl.bench.model_flops import Work as CountedWork
from agentrl.bench.model_flops import update_flops
from agentrl.launch.model_shape import model_shape
from agentrl.models.sizes import decoder_of
from agentrl.plan.published import PUBLISHED

MORE = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "num_local_experts": 4,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
    "some layers dense": {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 16,
        "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "biases": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": False,
    },
}  # fmt: skip


def meta_model(config: dict[str, Any]) -> Any:
    kind = str(config["model_type"])
    made = AutoConfig.for_model(kind, **{key: value for key, value in config.items() if key != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize("config", [*PUBLISHED.values(), *MORE.values()], ids=[*PUBLISHED, *MORE])
def test_parameters_are_those_of_transformers(config: dict[str, Any]) -> None:
    model = meta_model(config)
    assert decoder_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03e9),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.6e9),
        ("Qwen/Qwen3-8B", 8.2e9),
        ("Qwen/Qwen3-30B-A3B", 30.5e9),
        ("Qwen/Qwen3-235B-A22B", 235e9),
    ],
)
def test_parameters_are_those_that_model_cards_name(name: str, published: float) -> None:
    assert decoder_of(PUBLISHED[name]).parameters == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("name", "active"), [("Qwen/Qwen3-30B-A3B", 3.3e9), ("Qwen/Qwen3-235B-A22B", 22e9)])
def test_active_parameters_of_experts_are_those_that_model_cards_name(name: str, active: float) -> None:
    found = decoder_of(PUBLISHED[name])
    assert found.active + 2 * found.head == pytest.approx(active, rel=0.02)


def test_operations_are_those_that_torch_counts() -> None:
    """Forward and backward of a small Llama; torch counts every pair of a dense mask, and no norms."""
    sizes: dict[str, Any] = MORE["mistral"] | {"model_type": "llama"}
    del sizes["head_dim"]
    tokens = 24
    config = LlamaConfig(**{key: value for key, value in sizes.items() if key != "model_type"})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    found = decoder_of(sizes)
    norms = (2 * found.layers + 1) * found.hidden
    own = 3 * (found.forward_flops(tokens, tokens, tokens**2) - 2 * norms * tokens)
    rotary = 2 * 8 * tokens  # transformers makes the angles with a product
    assert counter.get_total_flops() == pytest.approx(own + rotary, rel=1e-3)


def test_operations_are_those_of_the_gpu_benchmark() -> None:
    config = PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"]
    work = CountedWork(tokens=1000, predicted=700, pairs=90_000, trained=700)
    found = decoder_of(config)
    assert 3 * found.forward_flops(1000, 700, 90_000) == pytest.approx(update_flops(meta_model(config), work), rel=1e-9)


def test_sizes_agree_with_those_of_the_dry_run() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"):
        found, theirs = decoder_of(PUBLISHED[name]), model_shape(PUBLISHED[name])
        assert (found.parameters, found.kept, found.linear_sides) == (
            theirs.parameters, theirs.kept, theirs.linear_sides,
        )  # fmt: skip
        assert found.kv_bytes(2) == 4 * theirs.layers * theirs.kv_width


def test_one_row_reads_its_own_experts_and_many_rows_read_all() -> None:
    found = decoder_of(PUBLISHED["Qwen/Qwen3-30B-A3B"])
    assert found.read(1) == pytest.approx(found.active + found.head, rel=1e-9)
    assert found.read(10_000) == pytest.approx(found.parameters - found.head, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 4}, "hidden_size"),
        (PUBLISHED["Qwen/Qwen3-8B"] | {"kv_lora_rank": 512}, "latent"),
    ],
)
def test_models_of_other_kinds_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_of(config)


def test_a_text_model_inside_another_is_found() -> None:
    inner = PUBLISHED["Qwen/Qwen3-8B"]
    assert decoder_of({"model_type": "some_vl", "text_config": inner}) == decoder_of(inner)
