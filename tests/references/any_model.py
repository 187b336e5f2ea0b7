"""The references' forward pass by transformers itself, in float64: any family, one sequence at a time, no cache.

Its own code for experts and attention is the plainest of each class ("eager"), which shares nothing with the trainer's.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.models import families
from tests.references import cases, step

VOCABULARY = 256  # ids of the cases are below 250
DROPOUT = 0.5  # in each config: the reference computes in evaluation mode


def build_family(name: str, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a family's miniature, with dropout wherever its config has any."""
    for key in ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"):
        monkeypatch.setitem(families.SMALL, key, VOCABULARY)
    families.small_model(name, seed).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    noise = {key: DROPOUT for key in config if key.endswith("dropout")}
    (folder / "config.json").write_text(json.dumps(config | noise))


@functools.cache
def model_of(folder: Path) -> Any:
    """Loads a model in float64; it stands in the place of a Llama's hyperparameters."""
    how: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how).eval()


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Copies a model's weights, differentiable, by the names of its parameters."""
    return {name: one.detach().clone().requires_grad_() for name, one in model_of(folder).named_parameters()}


def distributions(weights: dict[str, Tensor], model: Any, ids: list[int], temperature: float) -> Tensor:
    """Returns ``[tokens, vocab]`` logprobs of the token that comes after each token."""
    inputs = {"input_ids": torch.tensor([ids]), "use_cache": False}
    out = functional_call(model, weights, args=(), kwargs=inputs, tie_weights=True)
    return (out.logits[0].double() / temperature).log_softmax(-1)


def use_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has episodes and reference steps computed by transformers."""
    for module in (step, cases):
        monkeypatch.setattr(module, "shape_of", model_of)
        monkeypatch.setattr(module, "weights_of", weights_of)
        monkeypatch.setattr(module, "distributions", distributions)
