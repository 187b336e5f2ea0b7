"""Decides whether a run can be resumed, and what is left of it to do.

Guarantees: a run whose last checkpoint is written but whose model or last evaluation is not is finished by a resume,
which makes no trainer step; one that is over is refused with what to change for more.
"""

from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.config.supervised import SUPERVISED, evaluates
from agentrl.evaluate.judged import check_evaluated
from agentrl.train.checkpoint_state import exported_step, latest_checkpoint, read_state, why_over

MODEL = "model"  # folder of the exported model


class RunError(UserError):
    """The run cannot start; the message says what to change."""


def check_resumable(recipe: Recipe, run_dir: Path) -> None:
    """Refuses to resume a run that has no checkpoint or is finished, or an evaluation that was not begun.

    Raises:
        UserError: There is no checkpoint, or the run has made all its steps or epochs, or used up its time, and wrote
            its model; or there is no evaluation.
    """
    if recipe.trainer.type is None:
        check_evaluated(run_dir)
        return
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise RunError(f"nothing to resume: {run_dir / 'checkpoints'} holds no complete checkpoint")
    state = read_state(checkpoint)
    over = why_over(recipe, state)
    if over is not None and not missing_outputs(recipe, run_dir, state):
        raise RunError(f"run {recipe.name!r} {over}")


def missing_outputs(recipe: Recipe, run_dir: Path, state: dict[str, Any]) -> list[str]:
    """Lists what a run that has made its last step still has to write.

    Args:
        recipe: The run's recipe.
        run_dir: The run's folder.
        state: State of its latest checkpoint.
    """
    missing = []
    if exported_step(run_dir / MODEL) != state["step"]:
        missing.append(f"{MODEL}/")
    judged = recipe.trainer.type in SUPERVISED and evaluates(recipe)  # other runs evaluate before their last checkpoint
    if judged and not (run_dir / f"eval-{state['step']:06d}.json").is_file():
        missing.append("the last evaluation")
    return missing


def only_evaluates(recipe: Recipe, run_dir: Path) -> bool:
    """Whether a run that is resumed has exported the model of its last step, so that no trainer has to start."""
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        return False
    state = read_state(checkpoint)
    return why_over(recipe, state) is not None and f"{MODEL}/" not in missing_outputs(recipe, run_dir, state)
