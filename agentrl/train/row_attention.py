"""Attention over packed rows that skips masked blocks.

Guarantees: each token has the position and attends to the keys of its own sequence, so packing changes only rounding;
fully masked blocks are not computed. CUDA uses torch's compiled ``flex_attention``; a CPU, where that has no backward
pass, uses :mod:`agentrl.train.tree_attention`.
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
from agentrl.models.tree_mask import Reach
from agentrl.models.way import form_of
from agentrl.train.policy import ModelRefused
from agentrl.train.shared_keys import SharedMask
from agentrl.train.tree_attention import TreeTiles, tree_attention

BLOCK = 128  # tokens; flex_attention's default block size
ATTENTION = "agentrl_tree"  # name under which our attention is registered with transformers


def choose_attention(model: Any, config: TrainerConfig, device: torch.device) -> None:
    """Prepares a model for packed or padded rows, as ``trainer.attention`` says.

    ``auto`` packs if the model supports it, but pads for compiled layers on a CPU, where our attention would break the
    compiled graphs.

    Raises:
        ModelRefused: ``trainer.attention=packed``, and the model's attention cannot be replaced.
    """
    way = form_of(model).way
    if way.rows == "padded" and config.attention == "packed":
        raise ModelRefused(
            f"trainer.attention=packed: the rows of {type(model).__name__} cannot be packed, because {way.why}; set "
            "trainer.attention=padded"
        )
    if way.rows != "trees":
        return
    can = device.type == "cuda" or (device.type == "cpu" and not config.compile)
    if config.attention == "packed" or (config.attention == "auto" and can):
        try:
            use_tree_attention(model)
        except ModelRefused:
            if config.attention == "packed":
                raise


def use_tree_attention(model: Any) -> None:
    """Makes a model accept :class:`TreeTiles` or a :class:`BlockMask` as its mask; other masks use PyTorch's attention.

    Raises:
        ModelRefused: The model's attention cannot be replaced.
    """
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)  # only logs if it cannot
    if not is_packed(model):
        raise ModelRefused(
            f"trainer.attention=packed: the attention of {type(model).__name__} cannot be replaced, so its rows "
            "cannot be packed; set trainer.attention=padded"
        )


def is_packed(model: Any) -> bool:
    """Whether a model is prepared for packed rows, see :func:`choose_attention`."""
    return model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION


def block_mask(
    ends: Tensor, own: Tensor | None = None, *, positions: Tensor | None = None, reach: Reach | None = None
) -> BlockMask:
    """Makes the block mask of a forest of prefix trees without a dense mask.

    A query sees a key if ``key <= query < ends[key]``. So a block of queries sees some of an earlier block of keys if
    the largest end of these is after the first query, and all of it if the smallest end is after the last query.

    Args:
        ends: int64 ``[length]`` index after each node's last descendant; ``length`` is a multiple of :data:`BLOCK`.
        own: int64 ``[blocks]`` numbers of the blocks whose queries are computed; ``None``: all.
        positions: int64 ``[length]`` depth of each node; needed for a limited reach.
        reach: Reach of tokens along their branch; ``None`` for all of it, which is the only one with ``own``.
    """
    blocks = len(ends) // BLOCK
    number = torch.arange(blocks, device=ends.device)
    rows = (number if own is None else own)[:, None]
    earlier = number[None, :] < rows  # [queries, keys]
    smallest, largest = ends.view(blocks, BLOCK).aminmax(dim=1)
    first = rows * BLOCK
    full = earlier & (smallest >= first + BLOCK)
    partial = (earlier & (largest > first) & ~full) | (number[None, :] == rows)
    nodes = (first + torch.arange(BLOCK, device=ends.device)).flatten()  # of each query

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        node = query if own is None else nodes[query]
        return (key <= node) & (node < ends[key])

    if reach is not None and reach.limited:
        assert positions is not None
        partial, full = _limited(partial, full, positions.view(blocks, BLOCK), reach)
        may_see = _and_reach(may_see, positions, reach)

    # Listed here for keys and for queries: BlockMask.from_kv_blocks takes five times as long.
    listed = [_listed(torch.stack(pair)) for pair in ((partial, full), (partial.T, full.T))]
    lists = [part[None, None] for of_both in listed for pair in zip(*of_both, strict=True) for part in pair]
    lengths = (len(nodes), len(ends))
    return BlockMask(lengths, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=may_see)


def _limited(partial: Tensor, full: Tensor, positions: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """Drops blocks that are out of reach, and computes with a mask those of which only a part may be in reach.

    Args:
        partial: bool ``[queries, keys]``, blocks that are computed with a mask.
        full: bool ``[queries, keys]``, blocks that are computed without one.
        positions: int64 ``[blocks, BLOCK]``.
        reach: The reach; a chunk drops no block.
    """
    low, high = positions.aminmax(dim=1)
    if reach.window is None:
        return partial | full, torch.zeros_like(full)
    some = (low[:, None] - high[None, :]) < reach.window
    inside = (high[:, None] - low[None, :]) < reach.window
    if reach.chunk is not None:
        inside = torch.zeros_like(inside)
    own = torch.eye(len(low), dtype=torch.bool, device=low.device)
    return ((partial & some) | (full & some & ~inside)) | own, full & inside & ~own


def _and_reach(may_see: Any, positions: Tensor, reach: Reach) -> Any:
    """Adds a reach to a function of ``BlockMask``; a token always sees itself."""

    def limited(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = may_see(batch, head, query, key)
        if reach.window is not None:
            seen = seen & (positions[query] - positions[key] < reach.window)
        if reach.chunk is not None:
            seen = seen & (positions[query] // reach.chunk == positions[key] // reach.chunk)
        return seen

    return limited


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of true entries of each row ``[kinds, rows]``, and their columns, padded with 0."""
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
    """Attention function for transformers: ``[batch, heads, length, size]`` to ``[batch, length, heads, size]``."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown or options.get("dropout"):
        raise ValueError(
            f"packed rows do not support {', '.join(unknown) or 'dropout'} of {type(module).__name__}; "
            "set trainer.attention=padded"
        )
    scale = options.get("scaling")
    if isinstance(attention_mask, SharedMask):
        key, value = attention_mask.gathered(key, value)
        attention_mask = attention_mask.inner
    if isinstance(attention_mask, TreeTiles):
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        return tree_attention(queries, keys, values, attention_mask, scale or query.shape[-1] ** -0.5)[None], None
    # A compiled layer compiles it as well; on a CPU it runs uncompiled.
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
