"""Attention over rows laid end to end: it computes only what each token may see.

Guarantees: a token gets the position and sees the keys that it has in its own sequence, so packing changes nothing but
rounding; blocks that no token sees are not computed. On CUDA it is torch's ``flex_attention``, compiled, which has no
backward pass on a CPU; there it is :mod:`agentrl.train.tree_attention`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.config.recipe import TrainerConfig
from agentrl.train.tree_attention import TreeTiles, tree_attention

BLOCK = 128  # tokens; flex_attention's own
ATTENTION = "agentrl_tree"  # our function's name among transformers' attention implementations


def choose_attention(model: Any, config: TrainerConfig, device: torch.device) -> None:
    """Prepare a model for the rows that ``trainer.attention`` asks for.

    ``auto`` packs them where the model can, but pads for layers that are compiled on a CPU: their graphs would end at
    each attention.

    Raises:
        ValueError: They are to be packed, and the model's attention cannot be exchanged.
    """
    can = device.type == "cuda" or (device.type == "cpu" and not config.compile)
    if config.attention == "packed" or (config.attention == "auto" and can):
        try:
            use_tree_attention(model)
        except ValueError:
            if config.attention == "packed":
                raise


def use_tree_attention(model: Any) -> None:
    """Have a model take :class:`TreeTiles` or a :class:`BlockMask` as its mask; any other goes to PyTorch's attention.

    Raises:
        ValueError: Its attention cannot be exchanged.
    """
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)  # only logs where it cannot
    if not is_packed(model):
        raise ValueError(
            f"{type(model).__name__} has an attention of its own, which cannot be exchanged: packed rows "
            "(trainer.attention) are not for it; set trainer.attention=padded"
        )


def is_packed(model: Any) -> bool:
    """Whether a model gets rows end to end: see :func:`choose_attention`."""
    return model.config.get_text_config()._attn_implementation == ATTENTION


def block_mask(ends: Tensor) -> BlockMask:
    """The mask of a forest as blocks, told from each block's smallest and largest end; no dense mask is made.

    A query sees a key where ``key <= query < ends[key]``. So a block of earlier keys is seen where its largest end lies
    after the first query, and seen by all where its smallest end lies after the last.

    Args:
        ends: int64 ``[length]``, index after each node's last descendant; whole blocks.
    """
    blocks = len(ends) // BLOCK
    number = torch.arange(blocks, device=ends.device)
    earlier = number[None, :] < number[:, None]  # [queries, keys]
    smallest, largest = ends.view(blocks, BLOCK).aminmax(dim=1)
    first = (number * BLOCK)[:, None]
    full = earlier & (smallest >= first + BLOCK)
    partial = (earlier & (largest > first) & ~full) | torch.eye(blocks, dtype=torch.bool, device=ends.device)

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    # Listed here for keys and for queries: BlockMask.from_kv_blocks takes five times as long.
    numbers, indices = _listed(torch.stack([partial, full, partial.T, full.T]))
    lists = [part[None, None] for pair in zip(numbers, indices, strict=True) for part in pair]
    lengths = (len(ends), len(ends))
    return BlockMask(lengths, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=may_see)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """``[kinds, rows]`` number of true entries of each row of ``[kinds, rows, columns]``, and their columns, then 0."""
    kinds, rows, columns = blocks.shape
    seen = blocks.cumsum(-1)
    places = torch.where(blocks, seen - 1, columns)  # the last place takes the rest, and is cut off
    order = torch.zeros(kinds, rows, columns + 1, dtype=torch.int32, device=blocks.device)
    order.scatter_(-1, places, torch.arange(columns, dtype=torch.int32, device=blocks.device).expand(blocks.shape))
    return seen[..., -1].int(), order[..., :-1]


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: ``[batch, heads, length, size]`` to ``[batch, length, heads, size]``."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown or options.get("dropout"):
        raise ValueError(
            f"packed rows do not know {', '.join(unknown) or 'dropout'} of {type(module).__name__}; "
            "set trainer.attention=padded"
        )
    scale = options.get("scaling")
    if isinstance(attention_mask, TreeTiles):
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        return tree_attention(queries, keys, values, attention_mask, scale or query.shape[-1] ** -0.5)[None], None
    # Within a compiled layer it is compiled with it; on a CPU it runs as it is.
    inner = query.device.type != "cuda" or torch.compiler.is_compiling()
    attended = (flex_attention if inner else _compiled())(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None
