"""Chooses ``trainer.reshard_after_forward=auto``: whether layers' gathered weights are freed after each use (ZeRO-3).

Guarantees: the choice is the same on all ranks, and said with its numbers. Kept weights save one all-gather of each
layer and micro-batch; they cost a rank the whole weights in the compute dtype, and whole gradients in float32 until
the last micro-batch.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.config.recipe import TrainerConfig
from agentrl.train.mesh import RankMesh
from agentrl.weights.gather import own_part

SHARE = 0.5  # of the free memory that kept weights and gradients may take; the rest is for activations and logits
SHARDED_EXPERTS = "efsdp"  # transformers' name of the ranks that shard the same experts
STATE = 16  # bytes of a parameter's shard: itself, its gradient, two moments, all float32


@dataclass(frozen=True)
class Choice:
    """A choice, and the sentence that says it.

    Attributes:
        frees: Whether layers are freed after each use.
        said: Sentence that says the choice and its reason.
    """

    frees: bool
    said: str


def choose(config: TrainerConfig, parameters: Iterable[Tensor], mesh: RankMesh, device: torch.device) -> Choice:
    """Chooses for a model whose parameters may not be sharded yet; a collective over all ranks for ``auto``."""
    asked = config.reshard_after_forward
    if asked != "auto":
        return Choice(asked, f"trainer.reshard_after_forward={str(asked).lower()}")
    ranks = mesh.shape.shards * mesh.shape.context
    whole, own = counted(parameters, ranks)
    free = torch.tensor(float(free_memory(device)))
    if mesh.shape.size > 1:
        dist.all_reduce(free, dist.ReduceOp.MIN)
    return decide(whole, ranks, free.item(), 2 if config.dtype == "bfloat16" else 4, own)


def counted(parameters: Iterable[Tensor], ranks: int) -> tuple[int, float]:
    """Counts what a rank computes with, and what it keeps of that.

    Args:
        parameters: Parameters that are not sharded by FSDP yet, except experts that ranks share: these are already.
        ranks: Ranks that will shard them.
    """
    whole, own = 0, 0.0
    for one in parameters:
        count = own_part(one).numel()  # with tensor parallelism, of this rank's matrices
        if isinstance(one, DTensor) and SHARDED_EXPERTS in (one.device_mesh.mesh_dim_names or ()):
            whole, own = whole + count * one.device_mesh[SHARDED_EXPERTS].size(), own + count
        else:
            whole, own = whole + count, own + count / ranks
    return whole, own


def decide(parameters: int, ranks: int, free: float, width: int, own: float | None = None) -> Choice:
    """Decides from numbers.

    Args:
        parameters: Parameters of a replica, those of one tensor rank.
        ranks: Ranks that shard them.
        free: Free bytes of the rank that has least, before anything is loaded.
        width: Bytes of a parameter in the compute dtype.
        own: Parameters of which a rank keeps the states; by default its share of all.
    """
    kept, state = (width + 4) * parameters, STATE * (parameters / ranks if own is None else own)
    fits = ranks == 1 or state + kept <= SHARE * free
    said = (
        f"trainer.reshard_after_forward=auto: {str(not fits).lower()}; whole weights and gradients take "
        f"{kept / 1e9:.3g} GB of a rank beside {state / 1e9:.3g} GB of shards, and {SHARE * free / 1e9:.3g} GB "
        f"(half of what is free) may be used"
    )
    return Choice(not fits, said)


def free_memory(device: torch.device) -> int:
    """Free bytes of a rank's device, or of its share of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return psutil.virtual_memory().available // local
