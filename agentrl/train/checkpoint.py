"""Checkpoints: parameters, optimizers, random states, and the controller's state after the same step.

Guarantees: a checkpoint folder named ``step-N`` is complete and on the disk (its files are synced, and it is renamed
into place last); a checkpoint that cannot be written leaves the older ones, and every rank learns so; it can be loaded
with another number of ranks, which then draw other random numbers; frozen parameters (with LoRA, all but the adapters)
are not in it; older checkpoints are removed only after the new one is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.train.checkpoint_state import REPLACED, STATE_FILE, read_state
from agentrl.train.learner import PolicyLearner
from agentrl.train.random_state import load_random_state, save_random_state


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the older ones are as they were. Raised on every rank."""


def save_checkpoint(
    folder: Path,
    step: int,
    engine: PolicyLearner,
    state: dict[str, Any],
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes ``folder/step-N`` and removes old checkpoints; a collective over all ranks.

    Args:
        folder: Folder of the run's checkpoints.
        step: Number of trainer steps done.
        engine: Learner whose policy, critic, optimizers and moving reference are saved.
        state: Other state to save, as JSON: elapsed seconds and the controller's epochs.
        keep: Number of newest checkpoints to keep.
        files: Name -> content of further files of the checkpoint, on rank 0.

    Raises:
        CheckpointFailed: The disk is full, say; the incomplete checkpoint is removed.
    """
    rank, partial = dist.get_rank(), folder / f".partial-step-{step:06d}"
    try:
        with _Together() as begun:
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        begun.check()
        with _Together() as written:
            save(_tensors(engine), checkpoint_id=str(partial))
            _sync(save_random_state(partial, rank, dist.get_world_size()))
        written.check()
        with _Together() as committed:
            if rank == 0:
                _write(partial, {**(files or {}), STATE_FILE: json.dumps({"step": step, **state}).encode()})
                target = commit(partial, folder / f"step-{step:06d}")
                _prune(target, keep)
        committed.check()
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return folder / f"step-{step:06d}"


def commit(partial: Path, target: Path) -> Path:
    """Gives a complete checkpoint its name; one of the same step is replaced, and there is always one of the two."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def load_checkpoint(checkpoint: Path, engine: PolicyLearner) -> dict[str, Any]:
    """Loads the tensors in place and returns the other saved state; a collective over all ranks."""
    tensors = _tensors(engine)
    load(tensors, checkpoint_id=str(checkpoint))
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


class _Together:
    """Runs a part of a collective in which some ranks may fail; afterwards every rank knows whether one did."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __enter__(self) -> "_Together":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._error = error
        return isinstance(error, OSError | CheckpointException)

    def check(self) -> None:
        """Raises on every rank if one of them failed.

        Raises:
            CheckpointFailed: A rank failed.
        """
        failed: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, None if self._error is None else _reason(self._error))
        reasons = [reason for reason in failed if reason is not None]
        if reasons:
            raise CheckpointFailed(reasons[0]) from self._error


def _reason(error: BaseException) -> str:
    """Returns the reason of a failure in one line: that of the first rank, where torch collected them."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files, the last one of which makes the checkpoint complete, and waits until they are on the disk."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
        _sync(folder / name)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def _prune(newest: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints, and what killed processes left of others."""
    checkpoints = sorted(p for p in newest.parent.glob("step-*") if p.is_dir())
    for old in [*checkpoints[:-keep], *newest.parent.glob(".partial-step-*"), *newest.parent.glob(f"{REPLACED}*")]:
        shutil.rmtree(old, ignore_errors=True)
