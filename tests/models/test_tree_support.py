"""Which models can compute several sequences as one tree, and how trainer and engine take the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from agentrl.engine.model import load_model as load_engine_model
from agentrl.models.probe import wrong_trees
from agentrl.models.tree_mask import Reach
from agentrl.models.tree_support import limited_attention
from agentrl.models.way import Way, form_of
from agentrl.train.policy import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FIT = {
    "llama": LlamaConfig(**SMALL),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
    "a window that is long enough": MistralConfig(**SMALL, sliding_window=32),
}
UNFIT = {
    "alibi": FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, initializer_range=0.2
    ),
    "alibi, no mask": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "state space": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "linear attention": Qwen3NextConfig(**SMALL, **HYBRID),
    "a short window": MistralConfig(**SMALL, sliding_window=4),
}


def make(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FIT)
def test_models_with_plain_attention_can(name: str, dtype: torch.dtype) -> None:
    assert wrong_trees(make(FIT[name]).to(dtype), Way()) is None


@pytest.mark.parametrize("name", UNFIT)
def test_others_cannot(name: str) -> None:
    assert wrong_trees(make(UNFIT[name]), Way()) is not None


def test_windows_count_where_sequences_are_longer() -> None:
    mixed = Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=40)
    assert limited_attention(mixed, 41) == ["sliding_attention"]
    assert limited_attention(mixed, 40) == []
    assert limited_attention(Qwen3NextConfig(**SMALL, **HYBRID), 10) == ["linear_attention"]


@pytest.mark.parametrize("name", ["alibi", "linear attention"])
def test_trainer_and_engine_take_them_in_a_slower_way_and_say_why(name: str, tmp_path: Path) -> None:
    make(UNFIT[name]).save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(tmp_path)
    why = "linear_attention layers" if name == "linear attention" else "does not accept an attention mask"
    way = form_of(load_model(tmp_path)).way
    assert way.rows == "padded" and why in way.why
    loaded = load_engine_model(str(tmp_path), "float32", "cpu")
    assert loaded.past == "caches" and why in loaded.why


def test_a_window_that_is_shorter_than_the_sequences_is_a_part_of_the_masks(tmp_path: Path) -> None:
    make(FIT["a window that is long enough"]).save_pretrained(tmp_path)
    assert form_of(load_model(tmp_path, context=32)).way == Way()
    assert form_of(load_model(tmp_path, context=33)).way.reaches == {"": Reach(window=32)}


def test_a_window_that_a_model_applies_to_places_in_a_row_is_found(tmp_path: Path) -> None:
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=kinds, window_size=32,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    make(config).save_pretrained(tmp_path)
    assert form_of(load_model(tmp_path, context=32)).way.rows == "trees"
    way = form_of(load_model(tmp_path, context=33)).way
    assert way.rows == "padded" and "depend on another" in way.why
