"""A reference Llama in float64: one sequence at a time, no cache, no packing, no attention mask but the causal one.

Written from the papers: RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), grouped queries
(arXiv:2305.13245), SwiGLU (arXiv:2002.05202). The weights are a dict of tensors with Hugging Face's names.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@dataclass(frozen=True)
class Shape:
    """Hyperparameters that a checkpoint's weights do not show."""

    layers: int
    heads: int
    kv_heads: int
    base: float
    epsilon: float


def shape_of(folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return Shape(
        config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"], base,
        config["rms_norm_eps"],
    )  # fmt: skip


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Loads a checkpoint's weights as differentiable float64 tensors."""
    return {name: w.double().requires_grad_() for name, w in load_file(folder / "model.safetensors").items()}


def states(weights: dict[str, Tensor], shape: Shape, ids: list[int]) -> Tensor:
    """Returns ``[tokens, hidden]`` states after the last norm; row ``t`` has seen tokens ``0`` to ``t``."""
    x = weights[EMBEDDING][torch.tensor(ids)]
    for layer in range(shape.layers):

        def of(name: str, layer: int = layer) -> Tensor:
            return weights[f"model.layers.{layer}.{name}.weight"]

        normal = _normalised(x, of("input_layernorm"), shape.epsilon)
        queries, keys, values = (normal @ of(f"self_attn.{one}_proj").T for one in "qkv")
        x = x + _attention(queries, keys, values, shape) @ of("self_attn.o_proj").T
        normal = _normalised(x, of("post_attention_layernorm"), shape.epsilon)
        gate = normal @ of("mlp.gate_proj").T
        x = x + (gate * gate.sigmoid() * (normal @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    return _normalised(x, weights[NORM], shape.epsilon)


def distributions(weights: dict[str, Tensor], shape: Shape, ids: list[int], temperature: float) -> Tensor:
    """Returns ``[tokens, vocab]`` logprobs of the token that comes after each token."""
    logits = states(weights, shape, ids) @ weights[EMBEDDING].T  # embeddings and head are tied
    return (logits / temperature).log_softmax(-1)


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _attention(queries: Tensor, keys: Tensor, values: Tensor, shape: Shape) -> Tensor:
    length, size = len(queries), queries.shape[1] // shape.heads
    query = _rotated(queries.view(length, shape.heads, size), shape.base)
    key = _rotated(keys.view(length, shape.kv_heads, size), shape.base)
    shared = shape.heads // shape.kv_heads  # query heads that share one head of keys and values
    key, value = (x.repeat_interleave(shared, 1) for x in (key, values.view(length, shape.kv_heads, size)))
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)


def _rotated(x: Tensor, base: float) -> Tensor:
    """Rotates the pairs ``(i, i + half)`` of each head's vector by ``position / base ** (i / half)``."""
    half = x.shape[2] // 2
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] / base ** (torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
