"""Writes the trained model as a Hugging Face folder.

Guarantees: the folder is complete or absent, and says in ``agentrl.json`` how many trainer steps it is of, so that a
resumed run knows whether it still has to be written.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import AutoTokenizer

from agentrl.train.checkpoint_state import CHAT_TEMPLATE, EXPORTED
from agentrl.train.first_mismatch import TrainingStopped
from agentrl.train.policy import Policy, reshard


def export_model(
    policy: Policy,
    weights: Iterable[tuple[str, torch.Tensor]],
    target: Path,
    step: int,
    start: Path,
    *,
    adapter: bool,
) -> None:
    """Writes a model folder with the current weights, atomically; a collective.

    A trained adapter is merged into the weights, and also saved in the folder ``adapter`` beside it, in PEFT's
    format.

    Args:
        policy: The trained policy.
        weights: Names and full tensors of its weights, gathered one by one on every rank.
        target: Folder to write, ``runs/<name>/model``.
        step: Number of trainer steps done.
        start: Folder of the starting policy, with the tokenizer.
        adapter: Whether an adapter was trained.

    Raises:
        TrainingStopped: The folder cannot be written (on rank 0).
    """
    model, rank = policy.model, dist.get_rank()
    dtype = getattr(model.config, "dtype", None) or torch.float32
    state: dict[str, torch.Tensor] = {}
    for name, full in weights:
        if rank == 0:
            state[name] = full.to(dtype=dtype, device="cpu")
    if rank == 0:
        try:
            _write(model, state, target, step, start)
        except (OSError, SafetensorError) as error:
            raise TrainingStopped(
                f"the model could not be written to {target}: {error}; --resume of this run writes it again"
            ) from error
    if adapter:
        from agentrl.train.lora import save_adapter

        reshard(policy)
        save_adapter(model, target.with_name("adapter"))
    dist.barrier()


def _write(model: object, state: dict[str, torch.Tensor], target: Path, step: int, start: Path) -> None:
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, state_dict=state)  # type: ignore[attr-defined]
        tokenizer = AutoTokenizer.from_pretrained(str(start))
        template = target.with_name(CHAT_TEMPLATE)
        if template.is_file():  # the recipe's template, which the model was trained with
            tokenizer.chat_template = template.read_text()
        tokenizer.save_pretrained(partial)
        (partial / EXPORTED).write_text(json.dumps({"step": step}))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
