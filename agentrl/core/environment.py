"""The environment contract: the async twin of ``gymnasium.Env``.

Guarantees for callers: ``reset`` comes first; ``step`` returns Gymnasium's 5-tuple; after ``terminated`` or
``truncated`` the next call is ``reset``; ``close`` may be called at any time, more than once. For language
environments an observation is the list of messages that are new since the last action, and an action is one assistant
message.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from agentrl.core.episode import Message

ObservationT = TypeVar("ObservationT")
ActionT = TypeVar("ActionT")
Info = dict[str, Any]


class Environment(ABC, Generic[ObservationT, ActionT]):
    """What an agent acts in; subclass it, or :class:`LanguageEnvironment` for chat.

    ``info`` may hold ``"metrics"``: a dict of numbers that are logged apart from the reward.
    """

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObservationT, Info]:
        """Start an episode.

        Args:
            seed: Makes the episode reproducible.
            options: The task: one dataset line.

        Returns:
            The first observation and info.
        """

    @abstractmethod
    async def step(self, action: ActionT) -> tuple[ObservationT, float, bool, bool, Info]:
        """Act once.

        Returns:
            Observation, reward of this step, terminated (the task's own end), truncated (a limit outside the task),
            info.
        """

    async def close(self) -> None:
        """Free whatever the environment holds."""


LanguageEnvironment = Environment[list[Message], Message]
"""Environment whose observations are new messages and whose actions are assistant messages."""


class SingleTurnEnvironment(LanguageEnvironment):
    """Ask once, judge the answer: subclasses write ``prompt`` and ``judge``."""

    def __init__(self) -> None:
        self._task: dict[str, Any] | None = None

    @abstractmethod
    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Messages that put the task to the model."""

    @abstractmethod
    def judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        """Reward of the answer, and numbers to log apart from it."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start with ``options`` as the task."""
        if options is None:
            raise ValueError(f"{type(self).__name__}.reset needs options: the task to put to the model")
        self._task = options
        return self.prompt(options), {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Judge the answer and terminate."""
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")
        task, self._task = self._task, None
        reward, metrics = self.judge(task, action.get("content") or "")
        return [], reward, True, False, {"metrics": metrics}
