"""Append-only journal with the outcome of every admitted group.

Guarantees: one line per group and outcome, flushed at once; a resumed run adds a line that voids the records of the
steps after its checkpoint. Each episode is written once, as one JSON line of another file in the same folder.
"""

import json
from pathlib import Path
from typing import Literal, TextIO

from agentrl.core.episode import Episode

GroupOutcome = Literal["trained", "filtered", "failed", "cancelled", "resumed"]


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

    def group(
        self, outcome: GroupOutcome, *, draw: int, task: str, step: int | None = None, reason: str | None = None
    ) -> None:
        """Record how a group ended."""
        record = {"outcome": outcome, "draw": draw, "task": task, "step": step, "reason": reason}
        self._append("journal.jsonl", json.dumps({k: v for k, v in record.items() if v is not None}))

    def resumed(self, step: int) -> None:
        """Void the records of the steps after ``step``."""
        self._append("journal.jsonl", json.dumps({"outcome": "resumed", "step": step}))

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
