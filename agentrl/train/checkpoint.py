"""Checkpoints: parameters, optimizers, random states, and the controller's state after the same step.

Guarantees: a checkpoint can be loaded with another number of ranks, which then draw other random numbers; frozen
parameters (with LoRA, all but the adapters) are not in it. When one counts, and what is left of one that was cut off or
could not be written: :mod:`agentrl.train.checkpoint_saver`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from agentrl.train.checkpoint_saver import CheckpointSaver
from agentrl.train.checkpoint_state import read_state
from agentrl.train.learner import PolicyLearner
from agentrl.train.plain_shards import in_blocks, laid_out_as
from agentrl.train.random_state import load_random_state


def save_checkpoint(
    saver: CheckpointSaver,
    step: int,
    engine: PolicyLearner,
    state: dict[str, Any],
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Starts to write a checkpoint; a collective over all ranks.

    Args:
        saver: Saver of the run's checkpoints, which goes on beside training.
        step: Number of trainer steps done.
        engine: Learner whose policy, critic, optimizers and moving reference are saved, as they are now.
        state: Other state to save, as JSON: elapsed seconds and the controller's epochs.
        files: Name -> content of further files of the checkpoint, on rank 0.

    Returns:
        Folder of the checkpoint; it is there when the save is complete.

    Raises:
        CheckpointFailed: The save before this one failed, or this one cannot begin.
    """
    return saver.save(step, in_blocks(_tensors(engine)), {"step": step, **state}, files or {})


def load_checkpoint(checkpoint: Path, engine: PolicyLearner) -> dict[str, Any]:
    """Loads the tensors in place and returns the other saved state; a collective over all ranks."""
    own = _tensors(engine)
    tensors = in_blocks(own)
    load(tensors, checkpoint_id=str(checkpoint))
    tensors = laid_out_as(tensors, own)
    for name, module, optimizer in _learned(engine):
        set_state_dict(
            module,
            optimizer,
            model_state_dict=tensors[name],
            optim_state_dict=tensors[_OPTIMIZERS[name]],
            options=StateDictOptions(strict=not _frozen(module)),
        )
    if engine.moving_reference is not None:
        set_model_state_dict(engine.moving_reference, tensors["reference"])
    load_random_state(checkpoint, dist.get_rank(), dist.get_world_size())
    return read_state(checkpoint)


_OPTIMIZERS = {"model": "optimizer", "critic": "critic_optimizer"}


def _learned(engine: PolicyLearner) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
    """Yields the trained modules and their optimizers by their names in a checkpoint."""
    yield "model", engine.policy, engine.optimizer
    if engine.critic is not None:
        yield "critic", engine.critic.critic, engine.critic.optimizer


def _tensors(engine: PolicyLearner) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, module, optimizer in _learned(engine):
        whole, tensors[_OPTIMIZERS[name]] = get_state_dict(module, optimizer)
        frozen = _frozen(module)
        tensors[name] = {key: tensor for key, tensor in whole.items() if key not in frozen}
    if engine.moving_reference is not None:
        tensors["reference"] = get_model_state_dict(engine.moving_reference)
    return tensors


def _frozen(module: nn.Module) -> set[str]:
    """Returns the names of the frozen parameters, tied copies included."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
