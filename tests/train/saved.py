"""Saves a checkpoint and waits until it is complete."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.train.checkpoint import save_checkpoint
from agentrl.train.checkpoint_saver import CheckpointSaver
from agentrl.train.learner import PolicyLearner


def save_whole(
    folder: Path, step: int, engine: PolicyLearner, state: dict[str, Any], files: Mapping[str, bytes] | None = None
) -> Path:
    """Returns the checkpoint's folder; one checkpoint is kept."""
    saver = CheckpointSaver(folder, keep=1)
    path = save_checkpoint(saver, step, engine, state, files)
    saver.settle()
    return path
