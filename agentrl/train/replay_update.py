"""Computes a step's update once more, on one rank, from the weights that it started from.

Guarantees: a trainer like the run's own, in a process group of one rank, with the start model or the checkpoint before
the step; nothing is served, saved or written to the run's folder. Sums over several ranks are added in another order
than in the run, so its figures differ in the last digits.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from agentrl.config.mesh import ONE_RANK
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.train.__main__ import build_trainer
from agentrl.train.checkpoint import load_checkpoint


def replay_update(
    recipe: Recipe,
    model: Path,
    checkpoint: Path | None,
    step: int,
    columns: Columns,
    learning_rate: float,
    oldest: int | None = None,
) -> dict[str, float]:
    """Runs one update and returns its metrics.

    Args:
        recipe: Resolved recipe of the run.
        model: Folder of the start model.
        checkpoint: Checkpoint of the weights that the step started from; ``None``: the start model.
        step: Number of updates before this one.
        columns: Episodes of the step.
        learning_rate: Learning rate of the step.
        oldest: Oldest version whose tokens carry a loss; ``None``: all do.
    """
    trainer = recipe.trainer.model_copy(update={"nproc": 1, "nodes": 1, **ONE_RANK})
    weights = recipe.weights.model_copy(update={"transport": "disk"})
    recipe = recipe.model_copy(update={"trainer": trainer, "weights": weights})
    device = torch.device("cuda", 0) if recipe.launch.device == "cuda" else torch.device("cpu")
    torch.set_flush_denormal(True)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="agentrl-replay-") as folder:
        dist.init_process_group(init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            made = build_trainer(recipe, model, Path(folder), device, None)
            if checkpoint is not None:
                load_checkpoint(checkpoint, made.engine)
            made.step = step
            return made.update(columns, learning_rate, oldest=oldest)
        finally:
            dist.destroy_process_group()
