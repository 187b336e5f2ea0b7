"""Reads the sizes of a model that memory and weight pushes depend on, without loading it.

Guarantees: sizes come from the model's ``config.json``, or if that lacks some, from the headers of its weight files.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.models.sizes import decoder_of

_ODD = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError)  # of values that no model has


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that memory depends on.

    Attributes:
        parameters: Number of parameters; tied ones count once.
        layers: Number of decoder layers.
        kv_width: Number of key heads times head size, the width of one token's keys in one layer.
        vocab: Vocabulary size.
        linear_sides: Sum of rows and columns of all linear layers except the head; an adapter of rank 1 has so many
            parameters.
        kept: Number of activations per token that all layers keep for the backward pass.
        hidden: Width of the hidden states.
    """

    parameters: int
    layers: int
    kv_width: int
    vocab: int
    linear_sides: int = 0
    kept: int = 0
    hidden: int = 0


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Computes the sizes of a Llama-like decoder from its ``config.json``, as :mod:`agentrl.models.sizes` counts them.

    Raises:
        ValueError: The config lacks a key, or its layers are not of this kind.
    """
    sizes = decoder_of(config)
    return ModelShape(
        sizes.parameters,
        sizes.layers,
        sizes.kv_heads * sizes.head_dim,
        sizes.vocab,
        sizes.linear_sides,
        sizes.kept,
        sizes.hidden,
    )


def shape_of_folder(folder: Path) -> ModelShape:
    """Sizes of a model in Hugging Face's format; from its weights if its ``config.json`` lacks a key, or is odd."""
    try:
        return model_shape(json.loads((folder / "config.json").read_text()))
    except _ODD:
        return shape_of_weights(folder)


def shape_of_weights(folder: Path) -> ModelShape:
    """Reads ``parameters`` and ``linear_sides`` from the headers of a folder's safetensors files; other sizes are 0."""
    shapes = [shape for file in sorted(folder.glob("*.safetensors")) for shape in _header(file)]
    sides = sum(sum(shape) for shape in shapes if len(shape) == 2)
    return ModelShape(sum(map(math.prod, shapes)), layers=0, kv_width=0, vocab=0, linear_sides=sides)


def _header(file: Path) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file: 8 bytes with the header's size, the header as JSON, the data."""
    with file.open("rb") as opened:
        entries = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"]
