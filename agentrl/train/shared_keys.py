"""Gathers keys and values over the ranks that share a micro-batch's tokens.

Guarantees: a query sees the keys of all ranks' tokens that its mask allows; their gradients are added up over the
ranks' queries.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Their names from torch 2.13 on; the older ones warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(torch.autograd.Function):
    """Gathers ``[tokens, ...]`` of each rank of a group into ``[ranks * tokens, ...]``; the backward pass adds up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the parts of all ranks, in their order."""
        ctx.group = group
        own = own.contiguous()
        every = own.new_empty(dist.get_world_size(group) * len(own), *own.shape[1:])
        _all_gather(every, own, group=group)
        return every

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Returns the sum over ranks of the gradients of this rank's part."""
        grad = grad.contiguous()
        own = grad.new_empty(len(grad) // dist.get_world_size(ctx.group), *grad.shape[1:])
        _reduce_scatter(own, grad, group=ctx.group)
        return own, None


_opaque: Callable[..., Tensor] = torch.compiler.disable(Gather.apply)  # type: ignore[assignment]


class SharedMask(BlockMask):
    """A mask of this rank's queries over the keys of all ranks of a group.

    It is a :class:`BlockMask` only because transformers passes on such a mask of four axes unchanged.

    Args:
        inner: Mask of the own queries, tiles or blocks.
        order: int64 ``[keys]`` places of the keys that ``inner`` means among the gathered ones; ``None``: as gathered.
        group: Ranks that share the tokens.
    """

    def __init__(self, inner: BlockMask, order: Tensor | None, group: dist.ProcessGroup) -> None:
        self.inner = inner
        self.order = order
        self.group = group

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """``[1, 1, queries, keys]``."""
        return tuple(self.inner.shape)

    def __repr__(self) -> str:
        return f"SharedMask({self.inner!r})"

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gathers ``[1, heads, tokens, size]`` keys and values of all ranks; a collective over the group."""
        both = torch.cat([key, value], -1)[0].transpose(0, 1)  # one message
        every = _opaque(both, self.group)
        if self.order is not None:
            every = every[self.order]
        keys, values = every.transpose(0, 1)[None].split([key.shape[-1], value.shape[-1]], -1)
        return keys, values
