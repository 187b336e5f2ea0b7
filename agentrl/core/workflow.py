"""The workflow contract: a workflow runs one episode of a task.

Guarantees: ``arun_episode`` either returns an outcome or raises. Only the rollout controller turns exceptions, timeouts
and recorded tokens into an :class:`~agentrl.core.episode.Episode`, so no workflow can lose or invent one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.agent import Chat
from agentrl.core.episode import Message, StopReason, Task


class LLM(Chat, Protocol):
    """Source of chat sessions; the tokens of each session are recorded under its role.

    It is a chat client itself, that of the role ``assistant``.
    """

    def session(self, role: str = "assistant") -> Chat:
        """Returns the session of ``role`` in this episode; the same object every time."""
        ...

    def reward(self, value: float, role: str | None = None, *, message: Message | None = None) -> None:
        """Credits the last message that a role sampled with a step reward.

        Args:
            value: The reward.
            role: Role whose own reward this is: the sum of such rewards counts for it instead of the episode's shared
                reward. ``None``: a part of the shared reward, earned by the role that sampled ``message``, else by
                ``assistant``, or if that sampled nothing by the role that was opened last.
            message: The message that was acted on; it is found among the sampled ones by its content. Without it, or if
                it is none of them, the last sampled message is credited, or, if nothing was sampled since the last
                reward, the message that got that.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` is not finite, or the role has sampled nothing.
        """
        ...

    def earned(self) -> float:
        """Returns the sum of the parts of the shared reward that :meth:`reward` was given so far."""
        ...

    @property
    def sampled(self) -> bool:
        """Whether the policy has sampled a message in this episode."""
        ...

    @property
    def out_of_time(self) -> bool:
        """Whether the episode was cancelled because its time is over, and what there is may still be judged.

        A workflow that catches this cancellation may return an outcome with the stop reason ``timeout``; it has the
        time of a teardown. Without a reward, the episode has failed.
        """
        ...


@dataclass(frozen=True)
class Outcome:
    """Result of a finished episode, as the workflow reports it.

    Attributes:
        reward: Reward that all roles without one of their own share: the sum of the step rewards, ``None`` if it could
            not be determined. In a zero-sum game it is 0.
        stop_reason: Reason why the episode ended.
        metrics: Numbers to log separately from the reward.
        rewards: Role -> its own reward in the whole episode. It replaces the sum of what ``llm.reward(..., role=...)``
            gave; the difference counts at the role's end.
        close_error: Traceback of a teardown that raised or was cut; the episode keeps its reward.
        abandoned: Whether the teardown was cut at its time limit.
        answer: The answer that the environment found in what was said, in a form in which equal answers are equal
            texts: majority votes of an evaluation (``maj@k``) count them. ``None`` without one.
    """

    reward: float | None
    stop_reason: StopReason = StopReason.TERMINATED
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    close_error: str | None = None
    abandoned: bool = False
    answer: str | None = None


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
