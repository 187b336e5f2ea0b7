"""Checkpoints and the exported model of a training on TRL's trainers.

Guarantees: a checkpoint named ``step-N`` is complete (it gets its name last) and holds what ``transformers`` needs to
go on; older ones go only after the new one stands; ``model/`` is a plain Hugging Face folder, whole or not there.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agentrl.supervised.course import Course
from agentrl.train.checkpoint_state import STATE_FILE

_UNFINISHED = "checkpoint-*"  # as transformers names what it writes


class Checkpoints(TrainerCallback):
    """Gives what ``transformers`` saved its final name, and removes older ones.

    Args:
        folder: ``runs/<name>/checkpoints``; ``output_dir`` of the trainer.
        keep: How many stay.
        course: Knows the seconds of training so far.
    """

    def __init__(self, folder: Path, keep: int, course: Course) -> None:
        self._folder = folder
        self._keep = keep
        self._course = course

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After all ranks have written their part."""
        barrier()
        if state.is_world_process_zero:
            step = state.global_step
            written = self._folder / f"checkpoint-{step}"
            target = self._folder / f"step-{step:06d}"
            (written / STATE_FILE).write_text(json.dumps({"step": step, "elapsed": self._course.elapsed}))
            shutil.rmtree(target, ignore_errors=True)
            written.rename(target)
            for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        barrier()


def sweep_unfinished(folder: Path) -> None:
    """Remove what a run left that was killed while it saved."""
    for rest in folder.glob(_UNFINISHED):
        shutil.rmtree(rest, ignore_errors=True)


def export(model: Any, tokenizer: Any, target: Path, dtype: Any) -> None:
    """Write a Hugging Face folder, whole or not at all.

    Args:
        model: A ``transformers`` model.
        tokenizer: Its tokenizer, with the chat template that it learned with.
        target: ``runs/<name>/model``.
        dtype: What the weights are written in.
    """
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
