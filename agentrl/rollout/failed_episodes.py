"""Writes the failed episodes of a run to ``failed-episodes.jsonl``.

Guarantees: one line for each failed attempt, retried ones included, with what is needed to run it again (task, seed);
the first of each kind (:mod:`agentrl.rollout.failure_kinds`) with its traceback, each later one with the number of its
kind so far. A resumed run counts on; a full disk leaves whole lines out. Read with :func:`failure_counts`.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.core.episode import Episode, StopReason
from agentrl.core.whole_lines import WholeLines
from agentrl.core.writer_thread import AtOnce, Writer
from agentrl.rollout.failure_kinds import kind_of

FILE = "failed-episodes.jsonl"
_CANCELLED = frozenset({StopReason.CANCELLED, StopReason.STALE})  # not needed any more, or too old to be trained
MOST_KINDS = 1000  # kinds that are told apart; what comes after them is counted as one more


class FailedEpisodes:
    """The failed episodes of one run.

    Args:
        run_dir: Folder of the run; ``None`` writes nothing.
        writer: Writes the lines, of which it has none left when the file is closed.
    """

    def __init__(self, run_dir: Path | None, writer: Writer | None = None) -> None:
        self._writer = writer or AtOnce()
        self._path = None if run_dir is None else run_dir / FILE
        self._lines: WholeLines | None = None
        self._counts = Counter[str]()
        if self._path is not None and self._path.is_file():
            self._counts.update(dict(failure_counts(self._path)))

    def add(self, episode: Episode) -> None:
        """Write a failed episode; nothing of one that did not fail, or that the controller cancelled."""
        if self._path is None or not episode.failed or episode.stop_reason in _CANCELLED:
            return
        kind = kind_of(episode)
        kind = kind if kind in self._counts or len(self._counts) < MOST_KINDS else "further kinds"
        self._counts[kind] += 1
        said: dict[str, Any] = {
            "kind": kind,
            "count": self._counts[kind],
            "task_id": episode.task_id,
            "group_id": episode.group_id,
            "index": episode.index,
            "attempt": episode.attempt,
            "seed": episode.seed,
            "retried": episode.retried,
        }
        if self._counts[kind] == 1:
            said |= {"started": episode.started, "version": episode.version, "error": episode.error}
        if self._lines is None:
            self._lines = WholeLines(self._path)
        line = json.dumps(said).encode() + b"\n"
        self._writer.add(self._lines.add_all, line, len(line))

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def failure_counts(file: Path) -> list[tuple[str, int]]:
    """Returns the kinds of failures and their numbers, most frequent first.

    Args:
        file: ``failed-episodes.jsonl`` of a run's folder.
    """
    return Counter(line["kind"] for line in _lines(file)).most_common()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # it was not written to its end
                continue
