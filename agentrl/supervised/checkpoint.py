"""Checkpoints and the exported model of a training on TRL's trainers.

Guarantees: a checkpoint named ``step-N`` is complete (it gets its name last) and holds all that ``transformers`` needs
to resume; older ones are removed only after the new one is complete; ``model/`` is a plain Hugging Face folder, either
complete or absent.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from agentrl.supervised.course import Course
from agentrl.train.checkpoint_state import EXPORTED, STATE_FILE

_UNFINISHED = "checkpoint-*"  # the name transformers gives to a checkpoint


class Checkpoints(TrainerCallback):
    """Gives a checkpoint saved by ``transformers`` its final name, and removes older ones.

    Args:
        folder: ``runs/<name>/checkpoints``; ``output_dir`` of the trainer.
        keep: Number of checkpoints to keep.
        course: Supplies the seconds of training so far.
    """

    def __init__(self, folder: Path, keep: int, course: Course) -> None:
        self._folder = folder
        self._keep = keep
        self._course = course

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Rename the checkpoint once all ranks have written their part."""
        barrier()
        if state.is_world_process_zero:
            step = state.global_step
            written = self._folder / f"checkpoint-{step}"
            target = self._folder / f"step-{step:06d}"
            said = {"step": step, "elapsed": self._course.elapsed, "spent_budget": self._course.spent_budget}
            (written / STATE_FILE).write_text(json.dumps(said))
            shutil.rmtree(target, ignore_errors=True)
            written.rename(target)
            for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        barrier()


def sweep_unfinished(folder: Path) -> None:
    """Remove partial checkpoints of a run that was killed while saving."""
    for rest in folder.glob(_UNFINISHED):
        shutil.rmtree(rest, ignore_errors=True)


def export(model: Any, tokenizer: Any, target: Path, dtype: Any, step: int) -> None:
    """Write a complete Hugging Face folder, or none.

    Args:
        model: A ``transformers`` model.
        tokenizer: The model's tokenizer, with the chat template used in training.
        target: ``runs/<name>/model``.
        dtype: Dtype of the written weights.
        step: Number of trainer steps done, which the folder says.
    """
    partial = target.with_name(f".partial-{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / EXPORTED).write_text(json.dumps({"step": step}))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
