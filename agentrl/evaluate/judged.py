"""Goes on with an evaluation that was ended, also by ``kill -9``: episodes that were judged are read, not asked again.

Guarantees: a folder is gone on with only by an evaluation of the same set-up, whose differences the error names; a line
that was cut while it was written, or that cannot be read, counts as not judged; failed episodes are tried again, and of
two records of an attempt the later one counts. What failed episodes cost is known as well. An index is kept in memory,
and no episode.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.episode import Episode
from agentrl.evaluate.measures import usage_of
from agentrl.evaluate.setup import differences

SETUP = "setup.json"  # of the folder's evaluation, written before its first episode
EPISODES = "eval-episodes.jsonl"
RESULT = "result.json"
ASKED = "asked.json"  # what the call asked for
BEFORE_SETUP = {ASKED, "about.json", "config.json", "owner.json", "eval-tasks.jsonl"}
"""Files that are there before :data:`SETUP`."""


class ResumeError(UserError):
    """The evaluation in a folder cannot be gone on with."""


class Judged:
    """Episodes of a file that did not fail, by number of the task and index of the sample.

    Args:
        path: The file.
        total: Number of episodes of the whole evaluation.
        samples: Number of samples of each task.

    Attributes:
        unread: Number of lines that could not be read.
        lost: Numbers of tokens of the episodes that failed, which were paid for, see
            :func:`~agentrl.evaluate.measures.usage_of`.
    """

    def __init__(self, path: Path, total: int, samples: int) -> None:
        self._path = path
        self._samples = samples
        self._places = array("q", [-1]) * total
        self.unread = 0
        self.lost: Counter[str] = Counter()
        if path.is_file():
            self._read()

    def __len__(self) -> int:
        return sum(place >= 0 for place in self._places)

    def _read(self) -> None:
        place = 0
        with open(self._path, "rb") as file:
            for line in file:
                found = episode_of(line)
                if found is None:
                    self.unread += line.endswith(b"\n")
                elif found.failed:
                    self.lost.update(usage_of(found))
                else:
                    number = _number(found)
                    if number is not None and number * self._samples + found.index < len(self._places):
                        self._places[number * self._samples + found.index] = place
                place += len(line)

    def get(self, version: int, number: int, index: int) -> Episode | None:
        """Returns the episode of a sample, ``None`` if it was not judged.

        Args:
            version: Policy version of the evaluation; only that of an evaluation without a trainer, 0, is resumed.
            number: Number of the task.
            index: Index of the sample.
        """
        place = self._places[number * self._samples + index]
        if place < 0 or version:
            return None
        with open(self._path, "rb") as file:
            file.seek(place)
            return episode_of(file.readline())


def episode_of(line: bytes) -> Episode | None:
    """Returns the episode of a line; ``None`` for one that is cut or damaged. Keys of other versions are left out."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return Episode(**{name: value for name, value in record.items() if name in Episode.model_fields})
    except (ValueError, AttributeError):  # no JSON, no object, or not the fields of an episode
        return None


def _number(episode: Episode) -> int | None:
    number = episode.group_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def stored_episodes(path: Path) -> Iterator[Episode]:
    """Yields the episodes of a file in their order, without damaged lines; of an attempt, each record."""
    with open(path, "rb") as file:
        for line in file:
            found = episode_of(line)
            if found is not None:
                yield found


def check_evaluated(run_dir: Path) -> None:
    """Refuses a folder in which no evaluation was begun.

    Raises:
        ResumeError: There is nothing to go on with.
    """
    if not (run_dir / SETUP).is_file() and not _is_new(run_dir):
        raise ResumeError(f"nothing to resume: {run_dir} holds no evaluation ({SETUP}); leave out --resume")


def is_unfinished(run_dir: Path) -> bool:
    """Whether a folder holds an evaluation that was begun and has no result, or that ended before its first request."""
    return ((run_dir / SETUP).is_file() or _is_new(run_dir)) and not (run_dir / RESULT).is_file()


def _is_new(run_dir: Path) -> bool:
    """Whether a folder is that of an evaluation whose process ended before it knew what it measures."""
    return run_dir.is_dir() and all(
        file.is_dir() or file.name in BEFORE_SETUP or file.name.startswith(".") for file in run_dir.iterdir()
    )


def read_judged(run_dir: Path, setup: dict[str, Any]) -> Judged:
    """Returns the episodes of a folder that did not fail.

    Args:
        run_dir: Folder of the evaluation.
        setup: Set-up of the evaluation that goes on.

    Raises:
        ResumeError: The folder's evaluation has another set-up.
    """
    check_evaluated(run_dir)
    before = json.loads((run_dir / SETUP).read_bytes()) if (run_dir / SETUP).is_file() else setup
    different = differences(before, setup)
    if different:
        raise ResumeError(
            f"--resume: the evaluation in {run_dir} measures something else. Use its settings, or another --output. "
            "Different: " + "; ".join(different)
        )
    return Judged(run_dir / EPISODES, setup["tasks"] * setup["samples"], setup["samples"])
