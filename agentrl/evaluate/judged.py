"""Goes on with an evaluation that was ended, also by ``kill -9``: episodes that were judged are read, not asked again.

Guarantees: a folder is gone on with only by an evaluation of the same set-up, whose differences the error names; a line
that was cut while it was written is removed from the file; failed episodes are tried again, and of two records of an
attempt the later one counts.
"""

import json
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.episode import Episode
from agentrl.core.whole_lines import drop_cut_line
from agentrl.evaluate.setup import differences

SETUP = "setup.json"  # of the folder's evaluation, written before its first episode
EPISODES = "eval-episodes.jsonl"
Judged = dict[tuple[str, int], Episode]  # by group and index


class ResumeError(UserError):
    """The evaluation in a folder cannot be gone on with."""


def check_evaluated(run_dir: Path) -> None:
    """Refuses a folder in which no evaluation was begun.

    Raises:
        ResumeError: There is nothing to go on with.
    """
    if not (run_dir / SETUP).is_file():
        raise ResumeError(f"nothing to resume: {run_dir} holds no evaluation ({SETUP}); leave out --resume")


def read_judged(run_dir: Path, setup: dict[str, Any]) -> Judged:
    """Returns the episodes of a folder that did not fail.

    Args:
        run_dir: Folder of the evaluation.
        setup: Set-up of the evaluation that goes on.

    Raises:
        ResumeError: The folder's evaluation has another set-up.
    """
    check_evaluated(run_dir)
    different = differences(json.loads((run_dir / SETUP).read_bytes()), setup)
    if different:
        raise ResumeError(
            f"--resume: the evaluation in {run_dir} measures something else. Use its settings, or another --output. "
            "Different: " + "; ".join(different)
        )
    path = run_dir / EPISODES
    if not path.is_file():
        return {}
    drop_cut_line(path)
    found: Judged = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            episode = Episode(**{name: value for name, value in record.items() if name in Episode.model_fields})
            if not episode.failed:
                found[episode.group_id, episode.index] = episode
    return found
