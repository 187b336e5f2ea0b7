"""What can be read of a checkpoint without torch.

Guarantees: only complete checkpoints are found.
"""

import json
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
CHAT_TEMPLATE = "chat_template.jinja"  # in the run's folder, where the recipe names one; goes into the export


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in ``folder``."""
    found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdigit() and (p / STATE_FILE).is_file()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """State saved beside the tensors: ``step``, ``elapsed`` and the controller's state."""
    return json.loads((checkpoint / STATE_FILE).read_text())
