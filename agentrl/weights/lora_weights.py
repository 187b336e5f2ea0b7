"""Names and values of a LoRA model's weights: the plain model with the adapter merged, or the adapter alone.

Guarantees: names are those of the plain Hugging Face model, or of PEFT's file format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from agentrl.weights.gather import MergedWeight, Weight

ADAPTER = "default"  # PEFT's name of the only adapter
CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"  # PEFT's


def plain_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Hugging Face name -> weight of the plain model, adapters added; tied copies left out."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in model.named_parameters():
        owner, inside, rest = name.partition(".base_layer.")
        if inside:
            yield f"{owner}.{rest}", _merged(layers[owner], parameter) if rest == "weight" else parameter
        elif not parameter.requires_grad:
            yield name, parameter


def _merged(layer: Any, base: nn.Parameter) -> MergedWeight:
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return MergedWeight(base, down, up, layer.scaling[ADAPTER], layer.fan_in_fan_out)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name in PEFT's file -> weight of the adapter."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", parameter


def write_config(model: Any, folder: Path) -> None:
    """Write PEFT's ``adapter_config.json``."""
    model.peft_config[ADAPTER].save_pretrained(str(folder))
