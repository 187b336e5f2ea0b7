"""Which models can compute several sequences as one tree, and which are refused, by trainer and engine alike."""

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
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from agentrl.engine.model import ModelError
from agentrl.engine.model import load_model as load_engine_model
from agentrl.models.tree_support import limited_attention, not_for_trees
from agentrl.train.policy import load_model

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
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
    assert not_for_trees(make(FIT[name]).to(dtype)) is None


@pytest.mark.parametrize("name", UNFIT)
def test_others_cannot(name: str) -> None:
    assert not_for_trees(make(UNFIT[name])) is not None


def test_windows_count_where_sequences_are_longer() -> None:
    mixed = Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=40)
    assert limited_attention(mixed, 41) == ["sliding_attention"]
    assert limited_attention(mixed, 40) == []
    assert limited_attention(Qwen3NextConfig(**SMALL, **HYBRID), 10) == ["linear_attention"]


@pytest.mark.parametrize("name", ["alibi", "linear attention"])
def test_trainer_and_engine_refuse_them_by_name(name: str, tmp_path: Path) -> None:
    model = make(UNFIT[name])
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(tmp_path)
    named = "(?i)linear_attention layers" if name == "linear attention" else "(?i)falcon"
    with pytest.raises(ValueError, match=named):
        load_model(tmp_path)
    with pytest.raises(ModelError, match=named):
        load_engine_model(str(tmp_path), "float32", "cpu")


def test_the_trainer_refuses_a_window_that_is_shorter_than_its_sequences(tmp_path: Path) -> None:
    make(FIT["a window that is long enough"]).save_pretrained(tmp_path)
    load_model(tmp_path, context=32)
    with pytest.raises(ValueError, match=r"sliding_attention.*inference\.context_length=33"):
        load_model(tmp_path, context=33)
