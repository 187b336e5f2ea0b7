"""What a torchrun rank does before it computes: threads, device, process group.

Guarantees: all of it follows from the run's resolved recipe; a GPU that the recipe counts on and that is not there is
an error, not a slow run on the CPU.
"""

import os

import torch
import torch.distributed as dist

from agentrl.config.recipe import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of a resolved recipe


def set_threads(recipe: Recipe) -> None:
    """Give torch and what is built on it the rank's share of the cores; before the first tensor is computed."""
    threads = str(recipe.trainer.threads)
    os.environ["OMP_NUM_THREADS"] = threads  # accelerate sets torch's threads to it
    torch.set_flush_denormal(True)  # moments that fade to below 1e-38 would be slow; before there are threads
    torch.set_num_threads(int(threads))


def join_group(recipe: Recipe) -> torch.device:
    """Join the trainer's process group.

    Returns:
        The device that this rank computes on.
    """
    if recipe.launch.device != "cuda":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # gloo beside NCCL: batches travel between the hosts of the ranks, and with cpu_offload gradients stand there
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device
