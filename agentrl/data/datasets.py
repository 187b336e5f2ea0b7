"""Loads the tasks of a recipe's dataset section.

Guarantees: a task's id is its place in the dataset (``train/17``), whatever the order, seed or limit; the same
configuration and seed give the same tasks in the same order. Validation tasks are drawn with a fixed seed, so
runs with different seeds are evaluated on the same tasks.
"""

import inspect
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from agentrl.config.errors import DataError
from agentrl.config.recipe import ComponentConfig, DatasetConfig, ValidDatasetConfig
from agentrl.config.supervised import NO_ENV
from agentrl.core.episode import Task
from agentrl.core.registry import load, nearest, registered
from agentrl.core.task_source import NoTasksError
from agentrl.data.json_lines import JsonLines
from agentrl.data.tables import Mapped, Rows, check_columns, is_table, load_rows
from agentrl.envkit.make import discard, make

_FIXED_SEED = 20_240_501  # arbitrary, but must not change: it decides which validation tasks a limit keeps


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with a description of their source.

    Attributes:
        tasks: Tasks in the order of use; those of a table are made when they are asked for.
        source: Sentence that says where the tasks come from.
    """

    tasks: Sequence[Task]
    source: str


class TableTasks(Sequence[Task]):
    """Tasks of a table, made when they are asked for.

    Args:
        rows: Rows of the table.
        split: Split, the first part of a task's id.
        order: Numbers of the rows in the order of use.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], split: str, order: Sequence[int]) -> None:
        self._rows, self._split, self._order = rows, split, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TableTasks": ...
    def __getitem__(self, index: int | slice) -> "Task | TableTasks":
        if isinstance(index, slice):
            return TableTasks(self._rows, self._split, self._order[index])
        row = self._order[index]
        return Task(id=f"{self._split}/{row}", data=dict(self._rows[row]))


def load_tasks(
    config: DatasetConfig, *, seed: int, env: ComponentConfig | None = None, for_env: bool = True
) -> LoadedTasks:
    """Load the tasks of a dataset section.

    Args:
        config: The section. Its ``name`` is a registered dataset or ``path/to/file.py:function``; the function gets
            ``split``, ``path`` and ``kwargs`` and returns the lines and a sentence about their source. ``env`` stands
            for the environment's own ``dataset``. A file with a table, a folder, and an ``owner/name`` on the hub
            are loaded by :mod:`agentrl.data.tables`.
        seed: Seed of the training tasks' order; every other split has a fixed order.
        env: Recipe section of the environment.
        for_env: Whether the environment reads the tasks; examples to learn from have other columns.

    Raises:
        DataError: The dataset is unknown, not found, empty, lacks a column, or its loader does not take these
            arguments.
    """
    needed = _needed(env) if for_env and config.name != "env" else ()
    if config.name == "env" and env is not None:
        lines, source = _own_lines(config, env)
    else:
        lines, source = _named_lines(config, [config.columns.get(name, name) for name in needed])
    if not isinstance(lines, LAZY):
        lines = [_checked(line, config) for line in lines]
    if not len(lines):
        raise DataError(f"dataset {config.name!r}, split {config.split!r}, has no tasks ({source})")
    section = "train_dataset" if not isinstance(config, ValidDatasetConfig) else "valid_dataset"
    check_columns(lines, config.columns, needed, section)
    texts = needed if isinstance(lines, LAZY) else ()
    rows = Mapped(lines, config.columns, texts) if config.columns or texts else lines
    order = array("q", range(len(rows)))
    if config.shuffle:
        random.Random(seed if config.split == "train" else _FIXED_SEED).shuffle(order)
    tasks: Sequence[Task] = TableTasks(rows, config.split, order)
    if not isinstance(lines, LAZY):
        tasks = list(tasks)
    if config.limit is not None and config.limit < len(tasks):
        source = f"{source}; the first {config.limit} of {len(tasks)} {config.split} tasks"
        tasks = tasks[: config.limit]
    else:
        source = f"{source}; {len(tasks)} {config.split} {'task' if len(tasks) == 1 else 'tasks'}"
    return LoadedTasks(tasks, source)


LAZY = (Rows, JsonLines)
"""Rows that are made when they are asked for."""


def _needed(env: ComponentConfig | None) -> Sequence[str]:
    """Returns the columns that an environment says it reads."""
    return () if env is None or env.id == NO_ENV else tuple(getattr(load("env", env.id), "columns", ()))


def _named_lines(config: DatasetConfig, texts: Sequence[str]) -> tuple[Iterable[Any], str]:
    registered_or_file = config.name in registered("dataset") or ":" in config.name or config.path is not None
    if not registered_or_file and (is_table(config.name) or config.name.count("/") == 1):
        try:
            return load_rows(config.name, config.split, config.kwargs, texts)
        except DataError as error:
            meant = nearest(config.name, registered("dataset"))
            raise DataError(f"{error}{meant}") if meant else error from error
    try:
        loader = load("dataset", config.name)
    except LookupError as error:
        raise DataError(str(error.args[0])) from error
    try:
        inspect.signature(loader).bind(config.split, config.path, **config.kwargs)
    except TypeError as error:
        raise DataError(f"dataset {config.name!r} does not take kwargs={config.kwargs}: {error}") from error
    return loader(config.split, config.path, **config.kwargs)


def _own_lines(config: DatasetConfig, env: ComponentConfig) -> tuple[Iterable[Any], str]:
    if config.path is not None or config.kwargs:
        raise DataError("a dataset section without name means the environment's own, which takes no path and no kwargs")
    made = load("env", env.id)
    if not isinstance(made, type):  # a function that makes one, wrapped perhaps
        made = make(env.id, **env.kwargs)
        discard(made)
    try:
        return made.read_tasks(config.split)
    except NoTasksError as error:
        raise DataError(f"env.id={env.id}: {error}") from error


def _checked(line: object, config: DatasetConfig) -> dict[str, Any]:
    if not isinstance(line, Mapping):
        raise DataError(f"dataset {config.name!r} gave {line!r}; a line must be a mapping")
    return dict(line)
