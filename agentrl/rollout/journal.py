"""Append-only journal with the outcome of every admitted group.

Guarantees: one line per group and outcome, flushed at once, with the step that counts the group: the one that trains
it, or the next one after its end. A resumed run adds a line that voids the records of the steps that it repeats,
whatever their outcome; it draws those groups again. :func:`valid_outcomes` reads what is not void. Each episode is
written once, as one JSON line of another file in the same folder, whatever line ends its texts hold: with its task,
all conversations of all roles, and a message that several conversations share once. One whose messages cannot be
written as JSON becomes a failed episode with the reason. :func:`read_episodes` reads the file.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic_core import PydanticSerializationError

from agentrl.core.episode import Episode, StopReason

FILE = "journal.jsonl"
log = logging.getLogger(__name__)
_LINE_ENDS = {one: f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}  # that JSON allows inside a text
GroupOutcome = Literal["trained", "filtered", "failed", "stale", "cancelled"]


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

    def episode(self, episode: Episode, *, evaluation_step: int | None = None) -> Episode:
        """Append an episode to the training or evaluation episodes file, if enabled.

        Returns:
            The episode as it was recorded: a failed one if it could not be written.
        """
        if not self._with_episodes:
            return episode
        try:
            line = _line(episode)
        except (PydanticSerializationError, RecursionError) as error:  # an object of user code in a message, say
            episode = _without_messages(episode, f"the episode cannot be written as JSON: {error}")
            log.warning("task %s: %s", episode.task_id, episode.error)
            line = _line(episode)
        extra = "" if evaluation_step is None else f'"eval_step":{evaluation_step},'
        name = "episodes.jsonl" if evaluation_step is None else "eval-episodes.jsonl"
        self._append(name, "{" + extra + line[1:])
        return episode

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


def _line(episode: Episode) -> str:
    said = {role: one.shortened() for role, one in episode.trajectories.items()}
    episode = episode.model_copy(update={"trajectories": said})
    try:
        line = episode.model_dump_json()
    except PydanticSerializationError:  # a row may hold what is no JSON, an image, say; messages may not
        task = json.loads(json.dumps(episode.task, default=repr))
        line = episode.model_copy(update={"task": task}).model_dump_json()
    for end, escape in _LINE_ENDS.items():
        line = line.replace(end, escape)
    return line


def _without_messages(episode: Episode, error: str) -> Episode:
    """Returns a failed episode in the place of one that cannot be written."""
    names = ("group_id", "task_id", "index", "seed", "tag", "seconds", "abandoned", "started", "version", "sampling")
    kept = {name: getattr(episode, name) for name in names}
    return Episode(**kept, stop_reason=StopReason.ENVIRONMENT_ERROR, error=error)


def read_episodes(path: Path) -> Iterator[Episode]:
    """Reads the episodes of a run or an evaluation, in the order in which they ended.

    A line that was not written to its end is skipped.

    Args:
        path: ``episodes.jsonl`` or ``eval-episodes.jsonl`` of a run's folder.
    """
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if line.endswith("\n"):
                found = json.loads(line)
                found.pop("eval_step", None)
                yield Episode.model_validate(found)


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
