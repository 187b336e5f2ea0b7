"""Applies gradients of sharded parameters on one of several ranks.

``python -m tests.train.clipping STORE RANK RANKS SCALE OUT`` writes the norm and the whole parameters after a step of
plain gradient descent, as ``OUT/RANK.pt``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from agentrl.train.optimizer import apply_gradients

MAX_NORM = 0.5
SHAPES = ((5, 3), (7,), (1, 4))  # none divides by two


def gradients(scale: float) -> list[Tensor]:
    """Returns float64 gradients whose largest element is ``scale``, rounded to float32."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    largest = max(one.abs().max().item() for one in made)
    return [(one / largest * scale).float().double() for one in made]


def step(scale: float, mesh: DeviceMesh | None = None) -> tuple[float, list[Tensor]]:
    """Makes a step of size 1 from zeros; returns the norm, and the whole parameters."""
    parameters = []
    for gradient in gradients(scale):
        whole, start = gradient.float(), torch.zeros(gradient.shape)
        parameters.append(nn.Parameter(start if mesh is None else distribute_tensor(start, mesh, [Shard(0)])))
        parameters[-1].grad = whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])
    norm = apply_gradients(torch.optim.SGD(parameters, lr=1.0), MAX_NORM)
    found = [one.detach() for one in parameters]
    return norm, [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def main(store: str, rank: str, ranks: str, scale: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    torch.save(step(float(scale), init_device_mesh("cpu", (int(ranks),))), Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
