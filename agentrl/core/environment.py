"""The environment contract: the async twin of ``gymnasium.Env``.

Contract: ``reset`` is called first; ``step`` returns Gymnasium's 5-tuple; after ``terminated`` or ``truncated`` the
next call is ``reset``; ``close`` may be called at any time, and more than once. ``judge_unfinished`` is called at most
once in an episode, in place of a further ``step``, and ends it.
"""

import copy
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from agentrl.core.registry import Spec
from agentrl.core.task_source import NoTasksError, Source, tasks_of

if TYPE_CHECKING:
    import numpy as np
    from gymnasium import Space

ObservationT = TypeVar("ObservationT")
ActionT = TypeVar("ActionT")
Info = dict[str, Any]

_TASKS: dict[tuple[type, str], list[dict[str, Any]]] = {}  # by class and split; environments are made per episode


class Environment(ABC, Generic[ObservationT, ActionT]):
    """Base class of environments; subclass it, or :class:`LanguageEnvironment` for chat.

    ``info`` may hold ``"metrics"``: a dict of numbers that are logged apart from the reward.

    Attributes:
        observation_space: Gymnasium space of observations.
        action_space: Gymnasium space of actions.
        spec: Id and arguments of the environment; ``None`` unless :func:`agentrl.make` made it.
        reward_range: Lowest and highest reward of one step; ``agentrl env check`` tests rewards against it.
        dataset: Source of the tasks when ``reset`` gets none, see :data:`~agentrl.core.task_source.Source`.
        dataset_kwargs: Arguments of a registered dataset.
        columns: Names of the texts that a task must have; a table without one is refused before the first episode, and
            a number in its place becomes its text.
        split: Split of the dataset that tasks are drawn from.
        chosen_task: Latest result of :meth:`choose_task`.
    """

    observation_space: "Space[Any]"
    action_space: "Space[Any]"
    spec: Spec | None = None
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    dataset: ClassVar[Source | None] = None
    dataset_kwargs: ClassVar[dict[str, Any]] = {}
    columns: ClassVar[tuple[str, ...]] = ()
    split: str = "train"
    chosen_task: dict[str, Any] | None = None
    _np_random: "np.random.Generator | None" = None

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObservationT, Info]:
        """Starts an episode.

        Args:
            seed: Seed of the episode's random numbers.
            options: Task of the episode, one line of the dataset; without it, :meth:`choose_task` draws one.

        Returns:
            First observation and info.
        """

    @abstractmethod
    async def step(self, action: ActionT) -> tuple[ObservationT, float, bool, bool, Info]:
        """Takes one action.

        Returns:
            Observation, reward of this step, terminated (the task ended), truncated (a limit outside the task ended the
            episode), info.
        """

    async def judge_unfinished(self) -> tuple[float | None, Info]:
        """Judges the episode as it stands, when the run ends it before the environment does.

        Called in place of a further ``step`` if the policy ran out of context or of time, or took as many turns as the
        workflow allows. The next call is ``reset``. The default gives 0.0: the episode has earned what its steps
        earned, and in accuracy it counts as wrong. Override it if unfinished work is worth something, or costs
        something.

        Returns:
            Reward in addition to the steps' (``None``: it could not be determined, and the episode has no reward),
            and info, whose ``"metrics"`` are logged.
        """
        return 0.0, {}

    async def close(self) -> None:
        """Frees the environment's resources."""

    @property
    def unwrapped(self) -> "Environment[Any, Any]":
        """The environment inside all wrappers."""
        return self

    @property
    def np_random(self) -> "np.random.Generator":
        """Random number generator of this environment; :meth:`choose_task` seeds it."""
        if self._np_random is None:
            self._seed(None)
        assert self._np_random is not None
        return self._np_random

    def _seed(self, seed: int | None) -> None:
        from gymnasium.utils.seeding import np_random

        self._np_random, _ = np_random(seed)

    def choose_task(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the task of an episode: ``options``, or one drawn from ``dataset``; call it first in ``reset``.

        Args:
            seed: Seed of :attr:`np_random`; ``None`` continues its sequence from the previous episode.
            options: The ``options`` of ``reset``; ``None`` and an empty dict mean that no task was given.

        Raises:
            NoTasksError: There are no options, and the class has no ``dataset``.
        """
        if seed is not None:
            self._seed(seed)
        if options:
            self.chosen_task = options
        else:
            tasks = self.own_tasks(self.split)
            self.chosen_task = copy.deepcopy(tasks[int(self.np_random.integers(len(tasks)))])
        return self.chosen_task

    @classmethod
    def own_tasks(cls, split: str) -> list[dict[str, Any]]:
        """Returns the tasks of the class's ``dataset``, which is read once per process.

        Raises:
            NoTasksError: The class has no ``dataset``, or the dataset has no such split.
        """
        if (cls, split) not in _TASKS:
            _TASKS[cls, split] = cls.read_tasks(split)[0]
        return _TASKS[cls, split]

    @classmethod
    def read_tasks(cls, split: str) -> tuple[list[dict[str, Any]], str]:
        """Reads the tasks of :meth:`own_tasks`, and returns them with a description of their source."""
        if cls.dataset is None:
            raise NoTasksError(
                f"{cls.__name__}.reset needs options, the task of the episode: the class has no dataset to draw one "
                "from"
            )
        owner = next(base for base in cls.__mro__ if "dataset" in vars(base))  # its file's folder is the base of paths
        module = sys.modules.get(owner.__module__)
        file = getattr(module, "__file__", None)
        return tasks_of(cls.dataset, split, cls.dataset_kwargs, folder=Path(file).parent if file else None)
