"""Gathers full weights from their shards, one at a time, with a trained adapter added.

Guarantees: nothing is written to a parameter; what an adapter adds is computed in the parameters' own float32.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class MergedWeight:
    """A linear layer's weight as its LoRA adapter changes it: ``base + scale * up @ down``.

    Attributes:
        base: ``[out, in]``, or ``[in, out]`` where ``transposed``; frozen.
        down: ``[rank, in]``, LoRA's A.
        up: ``[out, rank]``, LoRA's B.
        scale: ``lora_alpha / lora_rank``.
        transposed: The layer multiplies from the left (GPT-2's ``Conv1D``).
    """

    base: Tensor
    down: Tensor
    up: Tensor
    scale: float
    transposed: bool

    requires_grad = True

    @property
    def shape(self) -> torch.Size:
        """Shape of the base weight."""
        return self.base.shape

    def full_tensor(self) -> Tensor:
        """The merged weight, float32, on every rank; a collective."""
        base, down, up = (full_tensor(part) for part in (self.base, self.down, self.up))
        left, right = (down.t(), up.t()) if self.transposed else (up, down)
        return torch.addmm(base, left, right, alpha=self.scale)


class MadeWeight(Protocol):
    """A weight that is computed from others when it is asked for."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole weight."""
        ...

    @property
    def requires_grad(self) -> bool:
        """Whether something that it is made of is trained."""
        ...

    def full_tensor(self) -> Tensor:
        """The whole weight, on every rank; a collective."""
        ...


Weight = Tensor | MergedWeight | MadeWeight


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(weight: Weight) -> Tensor:
    """The whole weight without its graph, on every rank; a collective where it is sharded or made of others."""
    if not isinstance(weight, Tensor):
        return weight.full_tensor()
    data = weight.detach()
    if isinstance(data, DTensor):
        data = data.to(data.device_mesh.device_type)  # shards may stand in the host's memory
        assert isinstance(data, DTensor)
        return data.full_tensor()
    return data
