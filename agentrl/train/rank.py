"""Sets up a torchrun rank: threads, device, process group.

Guarantees: everything follows from the run's resolved recipe; a missing GPU raises instead of a slow run on the CPU.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from agentrl.config.recipe import Recipe

COLLECTIVE_SPARE = 600.0  # seconds of a collective beyond the wait of rank 0 for a batch
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by their names in a resolved recipe


def set_threads(recipe: Recipe) -> None:
    """Sets the rank's number of CPU threads; must run before the first tensor operation."""
    threads = str(recipe.trainer.threads)
    os.environ["OMP_NUM_THREADS"] = threads  # accelerate sets torch's threads from it
    torch.set_flush_denormal(True)  # denormal moments would be slow; set before threads start
    torch.set_num_threads(int(threads))


def join_group(recipe: Recipe) -> torch.device:
    """Joins the trainer's process group, whose collectives wait for longer than rank 0 does for a batch.

    Returns:
        Device of this rank.
    """
    limit = timedelta(seconds=recipe.trainer.batch_timeout + COLLECTIVE_SPARE)
    if recipe.launch.device != "cuda":
        dist.init_process_group("gloo", timeout=limit)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # gloo as well: batches are sent between CPUs, and with cpu_offload gradients are in CPU memory
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    return device
