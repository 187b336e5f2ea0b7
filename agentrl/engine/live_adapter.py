"""Adds a LoRA adapter in PEFT's format to the live weights, in place.

Guarantees: an adapter is added to the latest full weights, whatever adapter was loaded before; it is added completely
or not at all; a copy of the base weights is kept, in the live dtype, and its digests are available. Adapters that this
engine cannot add exactly (other kinds, biases, modules saved in full) are refused.
"""

import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.engine.params import BadRequestError
from agentrl.engine.weight_store import DIGESTS, raw_bytes

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
PLAIN = {  # config keys that change the computation -> values that this engine supports
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
}


def is_adapter(folder: str) -> bool:
    """Whether a folder holds an adapter instead of full weights."""
    return (Path(folder) / CONFIG_FILE).is_file()


@dataclass(frozen=True)
class _Pair:
    """Weight update of one layer: ``scale * up @ down``, transposed if the layer stores its weight transposed."""

    down: Tensor
    up: Tensor
    scale: float
    transposed: bool

    def change(self) -> Tensor:
        """Computes the update in float32, in the shape of the layer's weight."""
        product = self.up.float() @ self.down.float() * self.scale
        return product.t() if self.transposed else product


class LiveAdapter:
    """Holds the adapter that the live weights include, and a copy of the weights without it."""

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}  # name of a live tensor -> its copy
        self._tensors: dict[str, Tensor] = {}  # the adapter's tensors as read from the file

    def load(self, model: nn.Module, folder: str) -> int:
        """Replace the current adapter by a folder's.

        Returns:
            Bytes read.

        Raises:
            BadRequestError: If the adapter does not fit the model; nothing was changed then.
        """
        tensors = _read(folder)
        pairs = _pairs(tensors, _config(folder))
        live = dict(model.state_dict())
        _check(pairs, live)
        with torch.no_grad():
            for name in self._base.keys() - pairs.keys():
                live[name].copy_(self._base.pop(name))
            for name, pair in pairs.items():
                base = self._base[name] if name in self._base else live[name].clone()
                self._base[name] = base
                live[name].copy_(base.float() + pair.change().to(base.device))
        self._tensors = tensors
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def forget(self, model: nn.Module, written: Container[str] | None) -> None:
        """Remove the adapter after other weights were written.

        Args:
            model: The live model.
            written: Names of live tensors with new values, which stay; ``None`` for all.
        """
        if self._base and written is not None:
            live = dict(model.state_dict())
            with torch.no_grad():
                for name, base in self._base.items():
                    if name not in written:
                        live[name].copy_(base)
        self._base, self._tensors = {}, {}

    def digests(self, action: str) -> dict[str, str]:
        """Digests of the adapter's tensors, under PEFT's names, and of the weights without it (``.base_layer.``)."""
        digest = DIGESTS[action]
        beneath = {name.removesuffix("weight") + "base_layer.weight": base for name, base in self._base.items()}
        return {name: digest(raw_bytes(tensor)) for name, tensor in (self._tensors | beneath).items()}


def _read(folder: str) -> dict[str, Tensor]:
    try:
        found = load_file(Path(folder) / ADAPTER_FILE)
    except (SafetensorError, OSError) as error:
        raise BadRequestError(f"cannot read {folder}: {error}") from error
    return {name: tensor.clone() for name, tensor in found.items()}  # the mapped file is overwritten later


def _config(folder: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_text())
    except (ValueError, OSError) as error:
        raise BadRequestError(f"cannot read {folder}/{CONFIG_FILE}: {error}") from error
    for key, known in PLAIN.items():
        if config.get(key, known[0]) not in known:
            raise BadRequestError(f"{CONFIG_FILE}: {key}={config[key]!r:.80} is not supported by the embedded engine")
    return config


def _pairs(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, _Pair]:
    """Maps names of live tensors to their weight updates."""
    layers = sorted({name.removesuffix(DOWN).removesuffix(UP) for name in tensors})
    wanted = {layer + part for layer in layers for part in (DOWN, UP)}
    if not layers or wanted != tensors.keys() or not all(layer.startswith(PREFIX) for layer in layers):
        odd = sorted(wanted ^ tensors.keys())[:3]
        raise BadRequestError(f"{ADAPTER_FILE} wants {PREFIX}LAYER{DOWN} and {UP} for each layer; see {odd}")
    try:
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadRequestError(f"{CONFIG_FILE} wants numbers lora_alpha and r: {error}") from error
    transposed = bool(config.get("fan_in_fan_out"))
    return {
        f"{layer.removeprefix(PREFIX)}.weight": _Pair(tensors[layer + DOWN], tensors[layer + UP], scale, transposed)
        for layer in layers
    }


def _check(pairs: dict[str, _Pair], live: dict[str, Tensor]) -> None:
    """Refuse updates of layers that the live model does not have, or with wrong shapes."""
    for name, pair in pairs.items():
        if name not in live:
            raise BadRequestError(f"the adapter is for {name}, which the model does not have; nothing was loaded")
        if pair.down.dim() != 2 or pair.up.dim() != 2 or pair.up.shape[1] != pair.down.shape[0]:
            raise BadRequestError(f"the adapter of {name} is no product of two matrices; nothing was loaded")
        shape = (pair.up.shape[0], pair.down.shape[1])
        if tuple(live[name].shape) != (shape[::-1] if pair.transposed else shape):
            raise BadRequestError(
                f"the adapter of {name} has shape {list(shape)} for {list(live[name].shape)}; nothing was loaded"
            )
