"""Checkpoints: parameters, optimizer and the controller's cut, written whole or not at all.

Guarantees: a checkpoint folder named ``step-N`` is complete (it is renamed into place last); it can be loaded by
another number of ranks; older ones are removed only after the new one stands.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.train.checkpoint_state import STATE_FILE, read_state


def save_checkpoint(
    folder: Path,
    step: int,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
    reference: nn.Module | None = None,
) -> Path:
    """Write ``folder/step-N``; a collective over all ranks.

    Raises:
        OSError: The disk is full (rank 0); nothing half-written is left.
    """
    rank = dist.get_rank()
    target = folder / f"step-{step:06d}"
    partial = folder / f".partial-step-{step:06d}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        save(_tensors(policy, optimizer, reference), checkpoint_id=str(partial))
        if rank == 0:
            (partial / STATE_FILE).write_text(json.dumps({"step": step, **state}))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            _prune(folder, keep)
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    return target


def load_checkpoint(
    checkpoint: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None = None
) -> dict[str, Any]:
    """Load tensors in place and return the saved state; a collective over all ranks."""
    tensors = _tensors(policy, optimizer, reference)
    load(tensors, checkpoint_id=str(checkpoint))
    set_state_dict(policy, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])
    if reference is not None:
        set_model_state_dict(reference, tensors["reference"])
    return read_state(checkpoint)


def _tensors(policy: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    tensors: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    if reference is not None:  # one that moves
        tensors["reference"] = get_model_state_dict(reference)
    return tensors


def _prune(folder: Path, keep: int) -> None:
    checkpoints = sorted(p for p in folder.glob("step-*") if p.is_dir())
    for old in checkpoints[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
