"""Finds checkpoints and reads their JSON state without importing torch.

Guarantees: only complete checkpoints are found.
"""

import json
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
STOP_FILE, SAVED_FILE = "stop-requested", "stopped"  # in the run's processes/: save and stop; done
CHAT_TEMPLATE = "chat_template.jinja"  # file in the run's folder if the recipe names a template; goes into the export


def latest_checkpoint(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step in ``folder``; ``None`` if there is none."""
    found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and (p / STATE_FILE).is_file()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state saved beside the tensors: ``step``, ``elapsed`` (seconds), the controller's state.

    ``spent_budget`` is the ``trainer.time_budget`` that this step was the last one of; ``None`` if more steps fit.
    """
    return json.loads((checkpoint / STATE_FILE).read_text())
