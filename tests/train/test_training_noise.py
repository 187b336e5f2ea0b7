"""No dropout in what is trained: every class of model gives the same logits in training mode, each time."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlavaConfig

from agentrl.train import policy as policy_module
from agentrl.train.policy import load_model
from agentrl.train.training_noise import remove_noise, still_random, without_noise
from tests.train.noisy_models import CONFIGS, P, write_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_model_is_not_random_in_training_mode(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = logits(plain)
    noisy = logits(plain.train())
    assert (noisy - expected).abs().max() > 0.01  # as the config says it would be
    model = load_model(folder, context=16)
    assert model.config._attn_implementation == "sdpa"
    for _ in range(3):
        torch.testing.assert_close(logits(model.train()), expected, atol=1e-5, rtol=1e-4)
    assert still_random(plain) is not None and still_random(model) is None


def test_a_model_whose_noise_is_not_found_is_refused_by_its_class(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shaky(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            assert out.logits is not None
            if self.training:
                out.logits = out.logits + 0.01 * torch.randn_like(out.logits)
            return out

    monkeypatch.setattr(policy_module, "auto_class", lambda config: Shaky)
    with pytest.raises(ValueError, match=r"Shaky cannot be trained: its logits change in training mode \(by up to"):
        load_model(tiny_model)


def test_noise_is_found_in_inner_configs_layers_and_attributes() -> None:
    config = LlavaConfig(text_config=LlamaConfig(attention_dropout=P))
    assert without_noise(config).text_config.attention_dropout == 0.0

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Dropout(P), nn.AlphaDropout(P), nn.Dropout2d(P)])
            self.layerdrop, self.attn_pdrop, self.jitter_noise = P, P, P
            self.dropped, self.use_dropout, self.drop_tokens = 7, True, None

    layer = Layer()
    kept = copy.deepcopy(vars(layer))
    remove_noise(layer)
    assert [one.p for one in layer.layers] == [0.0] * 3  # type: ignore[union-attr]
    assert (layer.layerdrop, layer.attn_pdrop, layer.jitter_noise) == (0.0, 0.0, 0.0)
    assert all(getattr(layer, name) == kept[name] for name in ("dropped", "use_dropout", "drop_tokens"))
