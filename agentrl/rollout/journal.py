"""Append-only journal with the outcome of every admitted group.

Guarantees: one line per group and outcome, flushed at once, with the step that counts the group: the one that trains
it, or the next one after its end. A resumed run adds a line that voids the records of the steps that it repeats,
whatever their outcome; it draws those groups again. :func:`valid_outcomes` reads what is not void. Each episode is
written once, as one JSON line of another file in the same folder.
"""

import json
from pathlib import Path
from typing import Any, Literal, TextIO

from agentrl.core.episode import Episode

FILE = "journal.jsonl"
GroupOutcome = Literal["trained", "filtered", "failed", "cancelled"]


class Journal:
    """Append-only journal of a run.

    Args:
        run_dir: Folder of the run, ``runs/<name>``.
        episodes: Whether to also write ``episodes.jsonl`` and ``eval-episodes.jsonl``.
    """

    def __init__(self, run_dir: Path, *, episodes: bool) -> None:
        self._run_dir = run_dir
        self._with_episodes = episodes
        self._files: dict[str, TextIO] = {}

    def group(self, outcome: GroupOutcome, *, draw: int, task: str, step: int, reason: str | None = None) -> None:
        """Record how a group ended.

        Args:
            outcome: How it ended.
            draw: Draw index of its task.
            task: Id of its task.
            step: Trainer step that counts the group, from 0.
            reason: Reason for an outcome other than trained.
        """
        record = {"outcome": outcome, "draw": draw, "task": task, "step": step, "reason": reason}
        self._append(FILE, json.dumps({k: v for k, v in record.items() if v is not None}))

    def resumed(self, step: int) -> None:
        """Void the records of step ``step`` and later: the run continues after its first ``step`` steps."""
        self._append(FILE, json.dumps({"outcome": "resumed", "step": step}))

    def episode(self, episode: Episode, *, evaluation_step: int | None = None) -> None:
        """Append an episode to the training or evaluation episodes file, if enabled."""
        if self._with_episodes:
            extra = "" if evaluation_step is None else f'"eval_step":{evaluation_step},'
            name = "episodes.jsonl" if evaluation_step is None else "eval-episodes.jsonl"
            self._append(name, "{" + extra + episode.model_dump_json()[1:])

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            self._files[name] = open(self._run_dir / name, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def valid_outcomes(run_dir: Path) -> list[dict[str, Any]]:
    """Reads the journal of a run: one record per group, without those that a resume made void."""
    found: list[dict[str, Any]] = []
    for line in (run_dir / FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["outcome"] == "resumed":
            found = [kept for kept in found if kept["step"] < record["step"]]
        else:
            found.append(record)
    return found
