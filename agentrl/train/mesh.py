"""The trainer's device mesh: replicas x FSDP shards x context x tensor.

Guarantees: ranks of one tensor group compute the same tokens with parts of each matrix; ranks of one context group
compute parts of the tokens of the same rows; both share rows, and all others have rows of their own. FSDP shards over
the ranks of shards and context together, because they all hold other gradients of the same sum.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.config.mesh import MeshShape


@dataclass(frozen=True)
class RankMesh:
    """The mesh as one rank sees it.

    Args:
        shape: Sizes; their product is the number of ranks.
        device: Type of the ranks' devices, ``cpu`` or ``cuda``.
        rank: Number of this rank.
    """

    shape: MeshShape
    device: str
    rank: int

    @classmethod
    def of_world(cls, device: torch.device, shape: MeshShape | None = None) -> "RankMesh":
        """Returns the mesh of the process group; without a shape all ranks are shards of one replica."""
        shape = shape or MeshShape(shards=dist.get_world_size())
        if shape.size != dist.get_world_size():
            raise ValueError(f"a mesh of {shape} has {shape.size} ranks, and the process group {dist.get_world_size()}")
        return cls(shape, device.type, dist.get_rank())

    @property
    def tensor_rank(self) -> int:
        """Place of this rank in its tensor group."""
        return self.rank % self.shape.tensor

    @property
    def context_rank(self) -> int:
        """Place of this rank in its context group."""
        return self.rank // self.shape.tensor % self.shape.context

    @property
    def averaged(self) -> int:
        """Number of ranks over which FSDP averages gradients."""
        return self.shape.data * self.shape.context

    def with_rows(self, data: int) -> range:
        """Returns the ranks that get the rows of one of ``shape.data`` parts."""
        together = self.shape.context * self.shape.tensor
        return range(data * together, (data + 1) * together)

    @cached_property
    def parameters(self) -> DeviceMesh:
        """The mesh that parameters lie on, with transformers' names: pp, dp_replicate, fsdp, tp."""
        sizes = (1, self.shape.replicas, self.shape.shards * self.shape.context, self.shape.tensor)
        return init_device_mesh(self.device, sizes, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The same ranks as experts lie on them, with transformers' names: pp, dp_replicate, efsdp, ep."""
        shared = self.shape.size // self.shape.replicas // self.shape.expert
        sizes = (1, self.shape.replicas, shared, self.shape.expert)
        return init_device_mesh(self.device, sizes, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: one dimension, or with replicas two."""
        if self.shape.size == self.shape.shards:
            return init_device_mesh(self.device, (self.shape.size,))
        return self.parameters["dp_replicate", "fsdp"] if self.shape.replicas > 1 else self.parameters["fsdp"]

    @cached_property
    def tokens(self) -> dist.ProcessGroup | None:
        """Ranks that together compute each token once: all of the same place in their tensor groups; ``None``: all."""
        if self.shape.tensor == 1:
            return None
        return self._group(("rest", "tensor"), (self.averaged, self.shape.tensor), "rest")

    @cached_property
    def context(self) -> dist.ProcessGroup:
        """Ranks that share the tokens of this rank's rows."""
        sizes = (self.shape.data, self.shape.context, self.shape.tensor)
        return self._group(("data", "context", "tensor"), sizes, "context")

    def _group(self, names: tuple[str, ...], sizes: tuple[int, ...], wanted: str) -> dist.ProcessGroup:
        return init_device_mesh(self.device, sizes, mesh_dim_names=names).get_group(wanted)
