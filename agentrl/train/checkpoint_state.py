"""Finds checkpoints and reads their JSON state without importing torch.

Guarantees: only complete checkpoints are found.
"""

import json
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe

STATE_FILE = "state.json"
STOP_FILE, SAVED_FILE = "stop-requested", "stopped"  # in the run's processes/: save and stop; done
ROLLOUTS_FILE = "rollouts.safetensors"  # in a checkpoint of a run with a controller: what that one goes on from
REPLACED = ".replaced-"  # before the name of a checkpoint while another of the same step takes its place
EXPORTED = "agentrl.json"  # file in the exported model: the step that it is of
CHAT_TEMPLATE = "chat_template.jinja"  # file in the run's folder if the recipe names a template; goes into the export


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step in ``folder``; ``None`` if there is none."""
    found = [p for p in folder.glob("*step-*") if _step(p) is not None and (p / STATE_FILE).is_file()]
    return max(found, key=lambda p: (_step(p), not p.name.startswith(REPLACED)), default=None)


def _step(path: Path) -> int | None:
    number = path.name.removeprefix(REPLACED).removeprefix("step-")
    return int(number) if number.isdigit() else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state saved beside the tensors: ``step``, ``elapsed`` (seconds), the controller's ``epochs``.

    ``spent_budget`` is the ``trainer.time_budget`` that this step was the last one of; ``None`` if more steps fit.
    """
    return json.loads((checkpoint / STATE_FILE).read_text())


def why_over(recipe: Recipe, state: dict[str, Any]) -> str | None:
    """Says in what a training has come to its end, and how to go on; ``None`` if more steps are to be made.

    Args:
        recipe: Recipe to go on with.
        state: State of the run's latest checkpoint.
    """
    step, spent, epochs = state["step"], state.get("spent_budget"), recipe.trainer.epochs
    if epochs is not None and state.get("controller", {}).get("epochs", 0) >= epochs:
        return f"has made all its {epochs} epochs; for more, set trainer.epochs=N"
    if step >= recipe.trainer.total_steps:
        return f"has made all its {step} steps; for more, set trainer.total_steps=N"
    budget = recipe.trainer.time_budget
    if spent is not None and budget is not None and budget <= spent:
        return f"has used up its {spent:g} s in {step} steps; for more time, set trainer.time_budget=N"
    return None


def exported_step(model: Path) -> int | None:
    """Returns the number of trainer steps of an exported model; ``None`` if there is none."""
    said = model / EXPORTED
    return json.loads(said.read_text())["step"] if said.is_file() else None
