"""What follows a model's decoder is found by trying it, and computed as the model does."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    PreTrainedConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from agentrl.models.decoder import decoder_of
from agentrl.models.own_head import HeadForm, OwnHead, head_form, head_parameters

SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
HEADS: dict[str, tuple[PreTrainedConfig, HeadForm]] = {
    "plain": (LlamaConfig(**SMALL), HeadForm()),
    "tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), HeadForm()),
    "scaled": (CohereConfig(**SMALL, logit_scale=0.0625), HeadForm(scale=0.0625)),
    "divided": (GraniteConfig(**SMALL, logits_scaling=8.0), HeadForm(scale=0.125)),
    "capped": (Gemma2Config(**SMALL, final_logit_softcapping=3.0), HeadForm(cap=3.0)),
    "biased": (GPTJConfig(vocab_size=48, n_embd=32, n_layer=1, n_head=4, rotary_dim=8), HeadForm(biased=True)),
    "of its own": (ModernBertDecoderConfig(**SMALL), HeadForm(own=True)),
}


def make(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("name", HEADS)
def test_the_form_of_a_head_is_found(name: str) -> None:
    config, form = HEADS[name]
    assert head_form(make(config)) == form


@pytest.mark.parametrize("name", HEADS)
def test_a_models_own_head_gives_its_logits(name: str) -> None:
    model = make(HEADS[name][0])
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        states = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(OwnHead(model)(states), logits)
        again = model(input_ids=ids, use_cache=False).logits[0]
    assert torch.equal(again, logits), "the decoder is put back"


def test_the_parameters_of_a_head_are_those_that_change_its_logits() -> None:
    assert head_parameters(make(HEADS["plain"][0])) == ["lm_head.weight"]
    assert head_parameters(make(HEADS["tied"][0])) == ["model.embed_tokens.weight"]
    own = head_parameters(make(HEADS["of its own"][0]))
    assert "decoder.bias" in own and any(name.startswith("lm_head.") for name in own)
    assert not any(name.startswith("model.layers") for name in own)
