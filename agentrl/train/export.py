"""Writes the trained model as a Hugging Face folder.

Guarantees: the folder is complete or absent, and says in ``agentrl.json`` how many trainer steps it is of, so that a
resumed run knows whether it still has to be written. It holds what is not trained but belongs to the model, too: its
buffers. Where all ranks see the folder each writes its own parts, and nothing is gathered, unless the files hold a
weight that is computed from several (:mod:`agentrl.weights.file_cuts`); a rank that cannot write ends all of them with
the reason.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers.core_model_loading import revert_weight_conversion

from agentrl.core.image_reader import copy_processor
from agentrl.core.model_files import read_tokenizer
from agentrl.train.checkpoint_state import CHAT_TEMPLATE, EXPORTED
from agentrl.train.first_mismatch import TrainingStopped
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import Policy, reshard
from agentrl.weights.file_names import file_weights
from agentrl.weights.gather import Weight, full_tensor
from agentrl.weights.own_parts import seen_by_all, write_parts
from agentrl.weights.safetensors_files import LARGEST, make_files, places


def export_model(
    policy: Policy,
    weights: Sequence[tuple[str, Weight]],
    target: Path,
    step: int,
    start: Path,
    mesh: RankMesh,
    *,
    adapter: bool,
    trust: bool = False,
    gather: bool = False,
    largest: int = LARGEST,
) -> None:
    """Writes a model folder with the current weights, atomically; a collective.

    A trained adapter is merged into the weights, and also saved in the folder ``adapter`` beside it, in PEFT's
    format.

    Args:
        policy: The trained policy.
        weights: Names and weights, sharded or not; tied copies left out.
        target: Folder to write, ``runs/<name>/model``.
        step: Number of trainer steps done.
        start: Folder of the starting policy, with the tokenizer.
        mesh: Mesh of the ranks.
        adapter: Whether an adapter was trained.
        trust: Whether code that comes with the model may run.
        gather: Whether rank 0 writes all weights even where each rank could write its own parts.
        largest: Most bytes of a file where each rank writes its own parts.

    Raises:
        TrainingStopped: The folder cannot be written.
    """
    reshard(policy)
    dtype = getattr(policy.model.config, "dtype", None) or torch.float32
    partial = target.with_name(f".partial-{target.name}")
    with _Writing(target) as begun:
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    begun.check(partial)
    parts = not gather and mesh.shape.size > 1 and seen_by_all(partial)
    named = file_weights(policy.model, weights) if parts else []
    shapes = [(name, tuple(weight.shape)) for name, weight in named]
    buffers = saved_buffers(policy.model)
    with _Writing(target) as made:
        if parts and mesh.rank == 0:
            # before the weights, whose files it would remove
            _save_rest(policy.model, {}, partial, start, target, trust)
            make_files(partial, shapes, dtype, revert_weight_conversion(policy.model, buffers), largest)
    made.check(partial)
    with _Writing(target) as written:
        if parts:
            which = [
                (partial / file, offset, weight)
                for (file, offset), (_, weight) in zip(
                    places(shapes, dtype, largest, rest=bool(buffers)), named, strict=True
                )
            ]
            write_parts(which, dtype, tensor=(mesh.tensor_rank, mesh.shape.tensor))
        else:
            state = _gathered(weights, dtype, mesh.rank)
            if mesh.rank == 0:
                _save_rest(policy.model, state | buffers, partial, start, target, trust)
    written.check(partial)
    if mesh.rank == 0:
        (partial / EXPORTED).write_text(json.dumps({"step": step}))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    if adapter:
        from agentrl.train.lora import save_adapter

        save_adapter(policy.model, target.with_name("adapter"))
    dist.barrier()


def exported_weights(model: Any, *, adapter: bool) -> list[tuple[str, Weight]]:
    """Returns names and weights of the plain model, a trained adapter added, tied copies left out."""
    if not adapter:
        return list(model.named_parameters())
    from agentrl.weights.lora_weights import plain_weights

    return list(plain_weights(model))


def _gathered(weights: Sequence[tuple[str, Weight]], dtype: torch.dtype, rank: int) -> dict[str, torch.Tensor]:
    """Gathers all weights to rank 0; a collective."""
    state: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        full = full_tensor(weight)
        if rank == 0:
            state[name] = full.to(dtype=dtype, device="cpu")
    return state


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Returns names and values of the buffers that belong to a model's files, such as a router's correction of scores.

    ``save_pretrained`` leaves out some, which the model's class names.
    """
    left = set(model._keys_to_ignore_on_save or ())
    found: dict[str, torch.Tensor] = {}
    for place, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{place}.{name}" if place else name
            if buffer is not None and name not in module._non_persistent_buffers_set and full not in left:
                found[full] = full_tensor(buffer).cpu()
    return found


def _save_rest(
    model: Any, state: dict[str, torch.Tensor], partial: Path, start: Path, target: Path, trust: bool
) -> None:
    """Writes the config, the tokenizer and the weights in ``state``."""
    dtype = getattr(model.config, "dtype", None)
    model.save_pretrained(partial, state_dict=state)
    model.config.dtype = dtype  # transformers leaves its name there, a string, which the next export would take
    tokenizer = read_tokenizer(start, trust=trust)
    template = target.with_name(CHAT_TEMPLATE)
    if template.is_file():  # the recipe's template, which the model was trained with
        tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(partial)
    copy_processor(start, partial)


class _Writing:
    """Runs a part of an export on this rank, and tells all ranks afterwards whether it failed on one."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._error: BaseException | None = None

    def __enter__(self) -> "_Writing":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._error = error
        return isinstance(error, OSError | SafetensorError)

    def check(self, partial: Path) -> None:
        """Raises on every rank if one of them failed, and removes what was written; a collective.

        Raises:
            TrainingStopped: A rank failed.
        """
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if self._error is None else str(self._error))
        reason = next((one for one in found if one is not None), None)
        if reason is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise TrainingStopped(
                f"the model could not be written to {self._target}: {reason}; --resume of this run writes it again"
            ) from self._error
