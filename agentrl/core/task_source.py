"""Reads the tasks of an environment from its ``dataset`` attribute.

Guarantees: the same source and split give the same tasks in the same order; a task is a dict; a held-out task is never
in the ``train`` split. A list or a ``.jsonl`` file is split by position: every fifth line is held out as ``test``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.core.registry import load

Lines = Sequence[Mapping[str, Any]]
Source: TypeAlias = str | Lines | Mapping[str, Lines]
"""A registered dataset, ``file.py:function``, a ``.jsonl`` file, a list of tasks, or a list for each split."""

HELD_OUT = 5  # every fifth line: a small list keeps most of its tasks for training


class NoTasksError(ValueError):
    """An environment has no dataset, or the dataset has no tasks in a split."""


def tasks_of(
    source: Source, split: str, kwargs: Mapping[str, Any] | None = None, *, folder: Path | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Reads the tasks of a split.

    Args:
        source: See :data:`Source`.
        split: ``train`` or ``test``.
        kwargs: Arguments of a registered dataset's loader.
        folder: Base folder of a relative ``.jsonl`` path that is not found from the working folder.

    Returns:
        Tasks in order, and a description of their source.

    Raises:
        NoTasksError: The split is empty or unknown.
        LookupError: The dataset is not registered, or the file does not exist.
    """
    if isinstance(source, str) and source.endswith(".jsonl"):
        path = _find(source, folder)
        lines, where = _split(_read(path), split), f"{path}"
    elif isinstance(source, str):
        found, where = load("dataset", source)(split, None, **(kwargs or {}))
        lines = list(found)
    elif isinstance(source, Mapping):
        if split not in source:
            raise NoTasksError(f"dataset has no split {split!r}; it has {', '.join(source)}")
        lines, where = list(source[split]), "the environment's own list"
    else:
        lines, where = _split(source, split), "the environment's own list"
    if not lines:
        raise NoTasksError(
            f"no task in split {split!r} of {where}"
            + ("; a list of fewer than 5 holds none out: give {'train': [...], 'test': [...]}" * (split == "test"))
        )
    return [_checked(line, where) for line in lines], where


def _split(lines: Iterable[Any], split: str) -> list[Any]:
    if split not in ("train", "test"):
        raise NoTasksError(f"a list is split into train and test; there is no split {split!r}")
    return [line for i, line in enumerate(lines) if (i % HELD_OUT == HELD_OUT - 1) == (split == "test")]


def _find(source: str, folder: Path | None) -> Path:
    for path in (*([folder / source] if folder else []), Path(source)):
        if path.is_file():
            return path
    raise LookupError(f"no file {source}" + (f", in {folder} or here" if folder else ""))


def _read(path: Path) -> list[Any]:
    found: list[Any] = []
    with path.open(encoding="utf-8-sig", newline="\n") as lines:  # other line ends may be inside a JSON string
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(json.loads(line))
                except ValueError as error:
                    raise NoTasksError(f"{path}, line {number} is not JSON: {error}") from error
    return found


def _checked(line: object, where: str) -> dict[str, Any]:
    if not isinstance(line, Mapping):
        raise NoTasksError(f"{where}: a task must be a mapping, got {line!r}")
    return dict(line)
