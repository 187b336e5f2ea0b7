"""The workflow contract: a workflow runs one episode of a task.

Guarantees: ``arun_episode`` either returns an outcome or raises. Only the rollout controller turns exceptions, timeouts
and recorded tokens into an :class:`~agentrl.core.episode.Episode`, so no workflow can lose or invent one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.agent import Chat
from agentrl.core.episode import StopReason, Task


class LLM(Protocol):
    """Source of chat sessions; the tokens of each session are recorded under its role."""

    def session(self, role: str = "assistant") -> Chat:
        """Returns the session of ``role`` in this episode; the same object every time."""
        ...

    def reward(self, value: float, role: str = "assistant") -> None:
        """Credits the last message that ``role`` sampled with a step reward.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` is not finite, or ``role`` has sampled nothing.
        """
        ...

    @property
    def sampled(self) -> bool:
        """Whether the policy has sampled a message in this episode."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Result of a finished episode, as the workflow reports it.

    Attributes:
        reward: Sum of the step rewards, ``None`` if it could not be determined.
        stop_reason: Reason why the episode ended.
        metrics: Numbers to log separately from the reward.
    """

    reward: float | None
    stop_reason: StopReason = StopReason.TERMINATED
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutWorkflow(ABC):
    """Base class of workflows: combines agents and environments, or implements any rollout directly."""

    @abstractmethod
    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Runs one episode of ``task``.

        Args:
            task: The task to attempt.
            llm: Source of chat sessions.
            seed: Seed of this episode; different for each member of a group.
        """
