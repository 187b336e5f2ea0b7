"""A mixture of experts that computes given experts, written from its definition, token by token: a reference."""

from typing import Any

import torch
from torch import Tensor


def take_experts(decoder: Any, given: Tensor) -> None:
    """Replaces the blocks of Mixtral or Qwen 3 MoE by their definition, over given experts.

    The weights of a token's experts are the softmax over the scores of all, of which those of the given ones are
    divided by their sum.

    Args:
        decoder: The decoder; its next forward passes are over one sequence.
        given: Integers ``[tokens, layers * chosen]``.
    """
    chosen = given.shape[1] // len(decoder.layers)
    for number, layer in enumerate(decoder.layers):
        block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe

        def forward(hidden: Tensor, block: Any = block, first: int = number * chosen) -> Tensor:
            flat, out = hidden.reshape(-1, hidden.shape[-1]), []
            for row, token in enumerate(flat):
                scores = (block.gate.weight @ token).softmax(-1)
                own = given[row, first : first + chosen].tolist()
                total, made = sum(scores[expert] for expert in own), torch.zeros_like(token)
                for expert in own:
                    gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
                    inner = torch.nn.functional.silu(gate) * up
                    made = made + scores[expert] / total * (block.experts.down_proj[expert] @ inner)
                out.append(made)
            return torch.stack(out).view_as(hidden)

        block.forward = forward
