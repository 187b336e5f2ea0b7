"""The workflow contract: how one task becomes one episode.

Guarantees: ``arun_episode`` either returns an outcome or raises; the rollout controller alone turns exceptions,
timeouts and recorded tokens into an :class:`~agentrl.core.episode.Episode`, so that no workflow can lose or invent one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.agent import Chat
from agentrl.core.episode import StopReason, Task


class LLM(Protocol):
    """Hands out chat sessions; the tokens of each are recorded under its role."""

    def session(self, role: str = "assistant") -> Chat:
        """The session of ``role`` in this episode; the same object every time."""
        ...

    def reward(self, value: float, role: str = "assistant") -> None:
        """Credit the last message sampled by ``role`` with a step reward."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Result of a finished episode, as the workflow reports it.

    Attributes:
        reward: Sum of the step rewards, ``None`` when it could not be determined.
        stop_reason: Reason why the episode ended.
        metrics: Numbers to log apart from the reward.
    """

    reward: float | None
    stop_reason: StopReason = StopReason.TERMINATED
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutWorkflow(ABC):
    """Composes agents and environments, or is written directly: any agentic rollout in a single file."""

    @abstractmethod
    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Run one episode of ``task``.

        Args:
            task: The task to attempt.
            llm: Source of chat sessions.
            seed: Seed of this episode; different for each member of a group.
        """
