"""Turns off what makes a model's forward pass random in training mode: dropout, layer drop and router jitter.

Guarantees: a model that :func:`still_random` accepts computes the same logits in training mode as in evaluation mode,
each time. An importance ratio is of two policies that only their weights tell apart: with dropout it would be of two
random subnetworks, and the policy's ratio to its own logprobs would not be 1.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

NOISE = ("drop", "jitter")  # in the names of a transformers config's keys and of modules' attributes
PASSES = 4  # in training mode: a layer that is dropped with probability 0.1 stays in all of them in 2 of 3 cases
TOKENS = 8
TOLERANCE = 1e-4  # largest difference over largest logit, in float32


def without_noise(config: PretrainedConfig) -> PretrainedConfig:
    """Sets the probabilities of dropout and the like to 0 in a model's config, in place, its parts' configs included.

    Some layers read their config in each forward pass, so that this comes before the model is made.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            without_noise(value)
        elif _is_noise(name, value):
            setattr(config, name, 0.0)
    return config


def remove_noise(model: nn.Module) -> None:
    """Sets the probabilities of dropout and the like to 0 in all modules of a model, in place."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_noise(name, value):
                setattr(module, name, 0.0)


def _is_noise(name: str, value: Any) -> bool:
    """Whether a config's key, or a module's attribute, is a probability or a size of noise that is not 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= 1 and any(part in name for part in NOISE)


@torch.no_grad()
def still_random(model: Any) -> str | None:
    """Returns why a model's logits are not the same in training mode; ``None`` if they are."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = ((torch.arange(TOKENS, device=model.device) * 2 + 1) * vocabulary // (2 * TOKENS))[None]
    was_training = model.training
    model.eval()
    expected = model(input_ids=ids, use_cache=False).logits
    if not bool(expected.isfinite().all()):
        model.train(was_training)
        return "its logits hold NaN or infinity: its weights are damaged"
    model.train()
    gaps = [(model(input_ids=ids, use_cache=False).logits - expected).abs().max().item() for _ in range(PASSES)]
    model.train(was_training)
    if max(gaps) <= TOLERANCE * max(1.0, expected.abs().max().item()):  # false for NaN
        return None
    change = f"by up to {max(gaps):.3g} in {PASSES} passes over the same tokens"
    return f"its logits change in training mode ({change}), so its importance ratios would be wrong"
