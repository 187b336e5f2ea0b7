"""Finds the evaluation, or the several of one call, that a call was cut in, so that the same call goes on with it.

Guarantees: only an evaluation that was asked for with exactly the same words and settings, that has no result, and that
no process still runs is found; where several are, the newest. What is kept names the variable of an API key, never a
key.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.evaluate.judged import ASKED, is_unfinished
from agentrl.launch.run_owner import RunOwned, RunOwner

RUNS = Path("runs")


def unfinished(
    asked: Mapping[str, Any], console: Console | None = None, cut: Callable[[Path], bool] = is_unfinished
) -> Path | None:
    """Returns the folder of the newest evaluation that was cut in the same call; ``None`` without one.

    Args:
        asked: Request of the call, as plain data.
        console: Console to say it on.
        cut: Function that says whether something is left to do in a folder.
    """
    wanted = json.loads(json.dumps(asked, default=str))
    files = sorted(RUNS.glob(f"eval-*/{ASKED}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        folder = file.parent
        if cut(folder) and _read(file) == wanted and not _is_running(folder):
            if console is not None:
                text = f"the same evaluation was cut before: going on in {folder}; --output NEW begins another"
                console.print(text, highlight=False, markup=False, soft_wrap=True)
            return folder
    return None


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError:  # it was cut while it was written
        return None


def _is_running(folder: Path) -> bool:
    try:
        with RunOwner(folder):
            return False
    except RunOwned:
        return True
