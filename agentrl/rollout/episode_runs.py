"""Runs the episodes that the controller and the evaluation order, in this process or elsewhere.

Guarantees: an order ends in exactly one record, failed or not; an order whose caller is cancelled is cancelled where it
runs, and the call returns when its environment is closed or given up, with a record of what there was until then.
:class:`InProcess` runs episodes here; :class:`~agentrl.rollout.worker_processes.WorkerProcesses` has other processes
run them.

The version of a running answer is known only when it ends. Until an episode's first answer, the episode counts as
sampled by the version that was served when it asked for that answer: later tokens would make it younger, which a server
that queues requests for longer than the bound of the ages makes likely, and then sampling it to its end helps nobody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import Episode, StopReason, Task, oldest_version, tag_of
from agentrl.core.workflow import RolloutWorkflow
from agentrl.inference.client import Client, EpisodeLLM
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode

Cancelled = Callable[[Episode], None]
"""Takes the record of what there was of an episode, if it is cancelled."""


@dataclass(frozen=True, eq=False)  # an order is itself alone
class EpisodeOrder:
    """One attempt at an episode.

    Attributes:
        task: Task of the episode.
        group_id: Id of the episode's group.
        index: Position of the episode in its group.
        seed: Seed of the episode.
        version: Policy version that is served, for the record.
        attempt: Number of earlier attempts.
        evaluation: Whether to use the sampling parameters of evaluation.
    """

    task: Task
    group_id: str
    index: int
    seed: int
    version: int | None = None
    attempt: int = 0
    evaluation: bool = False


Ages = Sequence[tuple[EpisodeOrder, int]]
"""Orders that run, and the policy version of the oldest token of each as far as it is known."""


class EpisodeRuns(Protocol):
    """A place where episodes run."""

    @property
    def abandoned(self) -> int:
        """Number of abandoned episodes whose tasks still run."""
        ...

    @property
    def in_flight(self) -> dict[str, int]:
        """Name of a worker process -> its episodes in flight; empty if they run in this process."""
        ...

    async def run(self, order: EpisodeOrder, cancelled: Cancelled | None = None) -> Episode:
        """Run one episode and return its record.

        Args:
            order: The episode.
            cancelled: Called with a record of what there was, if this call is cancelled.

        Raises:
            RolloutError: No further episode can be run.
        """
        ...

    def ages(self, served: int, tell: Callable[[Ages], None]) -> None:
        """Have ``tell`` called with the ages of the training episodes that run, at once or when they are known.

        Args:
            served: Policy version that was served until now.
            tell: Function that takes ages, those of all episodes or of some; it may be called several times.
        """
        ...


class InProcess:
    """Runs episodes in this process.

    Args:
        workflow: Workflow shared by all episodes.
        client: Client that opens a session for each episode.
        config: The recipe's rollout section.

    Attributes:
        workflow: As given.
    """

    def __init__(self, workflow: RolloutWorkflow, client: Client, config: RolloutConfig) -> None:
        self.workflow = workflow
        self._client = client
        self._limits = Limits.of(config)
        self._judges = config.on_timeout == "judge"
        self._left = Abandoned()
        self._training: dict[EpisodeOrder, _Sampling] = {}

    @property
    def abandoned(self) -> int:
        """Number of abandoned episodes whose tasks still run."""
        return len(self._left)

    @property
    def in_flight(self) -> dict[str, int]:
        """Nothing: there are no other processes."""
        return {}

    async def run(self, order: EpisodeOrder, cancelled: Cancelled | None = None) -> Episode:
        """Run one episode and return its record."""
        client: Client = self._client
        if not order.evaluation:
            client = self._training[order] = _Sampling(client)
        try:
            return await run_episode(
                self.workflow,
                order.task,
                client,
                group_id=order.group_id,
                index=order.index,
                seed=order.seed,
                limits=self._limits,
                left=self._left,
                evaluation=order.evaluation,
                version=order.version,
                attempt=order.attempt,
                judge_late=self._judges and not order.evaluation,
                cancelled=cancelled,
            )
        finally:
            self._training.pop(order, None)

    def ages(self, served: int, tell: Callable[[Ages], None]) -> None:
        """Call ``tell`` with the ages of the training episodes that run."""
        found = ((order, sampling.version(served)) for order, sampling in self._training.items())
        tell([(order, version) for order, version in found if version is not None])


class _Sampling:
    """Sampling of a running episode: a client that notes the model access which it gives the episode."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._llm: EpisodeLLM | None = None
        self._asked: int | None = None  # version that was served when it asked for its first answer
        self._oldest: int | None = None

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle for an episode, and the function that releases it."""
        self._llm, release = self._client.acquire(evaluation=evaluation, seed=seed)
        return self._llm, release

    def version(self, served: int) -> int | None:
        """Returns the version of its oldest token; the one that it asked for if it has none, or ``None``."""
        if self._oldest is None and self._llm is not None:
            trajectories = [session.trajectory for session in self._llm.sessions.values()]
            self._oldest = oldest_version(trajectories)
            if self._asked is None and any(one.nodes for one in trajectories):
                self._asked = served
        return self._asked if self._oldest is None else self._oldest


def without_sampling(order: EpisodeOrder, reason: StopReason, error: str) -> Episode:
    """Returns the record of an attempt of which nothing is known but how it ended."""
    return Episode(
        group_id=order.group_id,
        task_id=order.task.id,
        index=order.index,
        seed=order.seed,
        version=order.version,
        attempt=order.attempt,
        task=order.task.data,
        tag=tag_of(order.task.data),
        stop_reason=reason,
        error=error,
    )
