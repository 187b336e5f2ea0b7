"""Loads the tasks of a recipe's dataset section.

Guarantees: a task's id is its place in the dataset (``train/17``), whatever the order, seed or limit; the same
configuration and seed give the same tasks in the same order. Validation tasks are drawn with a fixed seed, so
runs with different seeds are evaluated on the same tasks.
"""

import inspect
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.errors import DataError
from agentrl.config.recipe import ComponentConfig, DatasetConfig
from agentrl.core.episode import Task
from agentrl.core.registry import load
from agentrl.core.task_source import NoTasksError
from agentrl.envkit.make import discard, make

_FIXED_SEED = 20_240_501  # arbitrary, but must not change: it decides which validation tasks a limit keeps


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with a description of their source.

    Attributes:
        tasks: Tasks in the order of use.
        source: Sentence that says where the tasks come from.
    """

    tasks: list[Task]
    source: str


def load_tasks(config: DatasetConfig, *, seed: int, env: ComponentConfig | None = None) -> LoadedTasks:
    """Load the tasks of a dataset section.

    Args:
        config: The section. Its ``name`` is a registered dataset or ``path/to/file.py:function``; the function gets
            ``split``, ``path`` and ``kwargs`` and returns the lines and a sentence about their source. ``env`` stands
            for the environment's own ``dataset``.
        seed: Seed of the training tasks' order; every other split has a fixed order.
        env: Recipe section of the environment.

    Raises:
        DataError: The dataset is unknown, not found, empty, or its loader does not take these arguments.
    """
    lines, source = _own_lines(config, env) if config.name == "env" and env is not None else _named_lines(config)
    tasks = [Task(id=f"{config.split}/{index}", data=_checked(line, config)) for index, line in enumerate(lines)]
    if not tasks:
        raise DataError(f"dataset {config.name!r}, split {config.split!r}, has no tasks ({source})")
    if config.shuffle:
        random.Random(seed if config.split == "train" else _FIXED_SEED).shuffle(tasks)
    if config.limit is not None and config.limit < len(tasks):
        source = f"{source}; the first {config.limit} of {len(tasks)} {config.split} tasks"
        tasks = tasks[: config.limit]
    else:
        source = f"{source}; {len(tasks)} {config.split} tasks"
    return LoadedTasks(tasks, source)


def _named_lines(config: DatasetConfig) -> tuple[Iterable[Any], str]:
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
