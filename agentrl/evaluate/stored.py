"""Files of an evaluation's scores by task and of its episodes, read when they are asked for.

Guarantees: ``eval-tasks.jsonl`` has one line for each task whose samples have ended, in the order in which they did;
``result.json`` holds the same scores by metric and task, and is there as a whole or not at all; neither is ever held in
memory while an evaluation runs. A damaged line of episodes is left out, and keys of other versions are.
"""

import json
import os
import shutil
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO, overload

from agentrl.config.errors import UserError
from agentrl.core.episode import Episode
from agentrl.core.whole_lines import WholeLines
from agentrl.evaluate.judged import EPISODES, episode_of
from agentrl.evaluate.tally import TaskScores

TASKS = "eval-tasks.jsonl"
COLUMNS = 200  # metrics whose scores are collected at a time, each in an open file
_BEFORE_TASKS = ', "per_task": {'  # in a result's file, behind its numbers


class TaskFile:
    """Writes the scores of tasks, one line each, to a file that begins anew.

    Args:
        run_dir: Folder of the evaluation.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / TASKS
        path.unlink(missing_ok=True)
        self._lines = WholeLines(path)

    def add(self, task: TaskScores) -> None:
        """Writes the scores of a task."""
        self._lines.add(json.dumps(vars(task)).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_tasks(run_dir: Path) -> Iterator[TaskScores]:
    """Yields the scores of the tasks of an evaluation."""
    with open(run_dir / TASKS, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                found = json.loads(line)
                samples = {int(index): value for index, value in found.pop("samples").items()}
                yield TaskScores(**found, samples=samples)


class TaskScoresByMetric(Mapping[str, dict[str, float]]):
    """Scores by metric and task, read from a folder's file when they are first asked for.

    Args:
        run_dir: Folder of the evaluation.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @cached_property
    def _values(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for task in read_tasks(self._run_dir):
            for name, value in task.scores.items():
                found.setdefault(name, {})[task.task] = value
        return found

    def __getitem__(self, metric: str) -> dict[str, float]:
        return self._values[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self._values == other

    __hash__ = None  # type: ignore[assignment]


class StoredEpisodes(Sequence[Episode]):
    """The last record of each attempt of an evaluation, in the order in which they ended, read when asked for.

    Args:
        run_dir: Folder of the evaluation.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EPISODES

    @cached_property
    def _places(self) -> Sequence[int]:
        last: dict[tuple[str, int], int] = {}
        place = 0
        if not self._path.is_file():
            return array("q")
        with open(self._path, "rb") as lines:
            for line in lines:
                attempt = _attempt(line)
                if attempt is not None:
                    last.pop(attempt, None)
                    last[attempt] = place
                place += len(line)
        return array("q", last.values())

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | Sequence[Episode]:
        if isinstance(index, slice):
            return [self._read(place) for place in self._places[index]]
        return self._read(self._places[index])

    def _read(self, place: int) -> Episode:
        with open(self._path, "rb") as file:
            file.seek(place)
            found = episode_of(file.readline())
        if found is None:
            raise UserError(f"{self._path}: the episode at byte {place} is of another version of agentrl, or damaged")
        return found


def _attempt(line: bytes) -> tuple[str, int] | None:
    """Returns the group and the index of a line's episode; ``None`` for a line that is cut or damaged."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
        return found["group_id"], found["index"]
    except (ValueError, KeyError, TypeError):
        return None


def result_numbers(path: Path) -> dict[str, Any]:
    """Reads the result of an evaluation without the scores of its tasks, which may be long.

    Args:
        path: File that :func:`write_result` wrote.

    Returns:
        The result without ``per_task``; empty if the file is damaged.
    """
    text, tasks, _ = path.read_text(encoding="utf-8").partition(_BEFORE_TASKS)
    try:
        found = json.loads(f"{text}}}" if tasks else text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the result of an evaluation, with the scores of its folder's tasks as ``per_task``.

    Args:
        path: File in the folder of the evaluation.
        found: The result without ``per_task``.
    """
    partial = path.with_name(f"{path.name}.partial")
    done: set[str] = set()
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(found)[:-1])
        file.write(_BEFORE_TASKS)
        while len(more := _write_columns(path.parent, file, done)) == COLUMNS:
            done |= more
        file.write("}}\n")
    os.replace(partial, path)


def _write_columns(run_dir: Path, file: TextIO, done: Collection[str]) -> set[str]:
    """Writes the scores of some metrics by task, each on the disk until all of its are known; returns their names.

    Args:
        run_dir: Folder of the evaluation.
        file: File to write to.
        done: Metrics that are written already.
    """
    columns: dict[str, TextIO] = {}
    with ExitStack() as opened:
        for task in read_tasks(run_dir):
            for name, value in task.scores.items():
                begun = name in columns
                if not begun and (name in done or len(columns) == COLUMNS):
                    continue
                if not begun:
                    columns[name] = opened.enter_context(TemporaryFile("w+", encoding="utf-8", dir=run_dir))
                columns[name].write(f"{', ' if begun else ''}{json.dumps(task.task)}: {json.dumps(value)}")
        for number, (name, column) in enumerate(columns.items()):
            file.write(f"{', ' if number or done else ''}{json.dumps(name)}: {{")
            column.seek(0)
            shutil.copyfileobj(column, file)
            file.write("}")
    return set(columns)
