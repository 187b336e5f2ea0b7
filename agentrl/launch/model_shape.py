"""The sizes of a model that memory and weight pushes depend on, without loading it.

Guarantees: read from a model's ``config.json``, or where that says too little from the headers of its weight files.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that memory depends on.

    Attributes:
        parameters: Number of parameters; tied ones count once.
        layers: Decoder layers.
        kv_width: Key heads times head size: keys of one token in one layer.
        vocab: Vocabulary size.
        linear_sides: Rows and columns of all linear layers but the head, summed: an adapter's parameters per rank.
        kept: Activations per token, over all layers, kept for the backward pass (count, not bytes).
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
    """Sizes of a Llama-like decoder from its ``config.json``; biases and norms are small and counted where known.

    Raises:
        ValueError: The config lacks what the estimate needs.
    """
    try:
        hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads, inner = config["num_attention_heads"], config["intermediate_size"]
    except KeyError as error:
        raise ValueError(f"config.json of a {config.get('model_type', 'model')!r} has no {error}") from error
    head = config.get("head_dim") or hidden // heads
    kv_width = (config.get("num_key_value_heads") or heads) * head
    attention = 2 * hidden * heads * head + 2 * hidden * kv_width
    if config.get("model_type") == "qwen2":
        attention += heads * head + 2 * kv_width
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    sides = 2 * (hidden + heads * head) + 2 * (hidden + kv_width) + 3 * (hidden + inner)
    # Of a Llama-like layer: both norms' inputs and results, queries, keys, values, what was attended to, gate and up.
    kept = 4 * hidden + 2 * heads * head + 2 * kv_width + 2 * inner
    return ModelShape(
        embeddings + layers * layer + hidden, layers, kv_width, vocab, layers * sides, layers * kept, hidden
    )


def shape_of_folder(folder: Path) -> ModelShape:
    """Sizes of a model in Hugging Face's format; those that its ``config.json`` does not tell come from its weights."""
    try:
        return model_shape(json.loads((folder / "config.json").read_text()))
    except ValueError:
        return shape_of_weights(folder)


def shape_of_weights(folder: Path) -> ModelShape:
    """Parameters and the sides of linear layers, from the headers of a folder's safetensors files."""
    shapes = [shape for file in sorted(folder.glob("*.safetensors")) for shape in _header(file)]
    sides = sum(sum(shape) for shape in shapes if len(shape) == 2)
    return ModelShape(sum(map(math.prod, shapes)), layers=0, kv_width=0, vocab=0, linear_sides=sides)


def _header(file: Path) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file: 8 bytes of size, JSON, data."""
    with file.open("rb") as opened:
        entries = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"]
