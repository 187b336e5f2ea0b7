"""Episodes as data: what was said, what was sampled, what it was worth, and why it ended.

Guarantees: an episode is plain JSON data and holds nothing of the process that made it. Messages form a graph: a shared
history is stored once, a branch is a node whose parent has another child. Each node's per-token lists have equal
length. A reward that is missing is ``None``, never 0; an episode that failed carries its reason and no reward.
"""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Message = dict[str, Any]
"""One chat message in OpenAI's shape: ``{"role": ..., "content": ...}``."""

NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled."""


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"  # the environment said so
    TRUNCATED = "truncated"  # the environment's or the workflow's limit
    LENGTH = "length"  # the model's answer hit max_new_tokens
    CONTEXT_OVERFLOW = "context_overflow"  # the next prompt does not fit the context
    ABORTED = "aborted"  # the server gave the request up and could not go on
    TIMEOUT = "timeout"  # the episode's own deadline
    ENVIRONMENT_ERROR = "environment_error"  # reset, step or the reward raised
    AGENT_ERROR = "agent_error"  # the agent raised
    INFERENCE_ERROR = "inference_error"  # the server refused, or could not be reached
    CANCELLED = "cancelled"  # the run ended first


FAILURES = frozenset(
    {
        StopReason.ABORTED,
        StopReason.TIMEOUT,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.AGENT_ERROR,
        StopReason.INFERENCE_ERROR,
        StopReason.CANCELLED,
    }
)
"""Stop reasons after which an episode has no reward and is never trained on."""


class Record(BaseModel):
    """Base of the data that is written down or sent: unknown keys refused."""

    model_config = ConfigDict(extra="forbid")


class Node(Record):
    """One message in a trajectory, with its tokens.

    Attributes:
        parent: Index of the node before it, ``None`` at a root.
        message: The message in OpenAI's shape.
        token_ids: ``[tokens]`` ids as the engine saw or sampled them; empty where the server gives none.
        loss_mask: ``[tokens]`` 1 where the policy sampled the token.
        logprobs: ``[tokens]`` behavior logprob, ``log_softmax(logits / T)``; 0.0 where the mask is 0.
        versions: ``[tokens]`` policy version that sampled the token, :data:`NOT_SAMPLED` where the mask is 0.
        finish_reason: For a sampled message, the server's reason: ``stop``, ``length`` or ``abort``.
        reward: Reward of the environment step that this message was the action of; ``None`` where there was none.
        teacher_logprobs: ``[tokens]`` logprob of each sampled token under the teacher, 0.0 where the mask is 0; empty
            where no teacher was asked.
    """

    parent: int | None
    message: Message
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish_reason: str | None = None
    reward: float | None = None
    teacher_logprobs: list[float] = []

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        """Refuse per-token lists of different lengths."""
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, loss_mask, logprobs and versions differ in length: {sorted(lengths)}")
        if self.teacher_logprobs and len(self.teacher_logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.teacher_logprobs)} teacher_logprobs for {len(self.token_ids)} token_ids")
        return self


class Trajectory(Record):
    """Everything one role said and heard in an episode, as a graph of messages."""

    nodes: list[Node] = []

    def path(self, index: int) -> list[int]:
        """Indices from the root to ``index``, both included."""
        chain: list[int] = []
        step: int | None = index
        while step is not None:
            chain.append(step)
            step = self.nodes[step].parent
        return chain[::-1]

    def leaves(self) -> list[int]:
        """Indices of the nodes that no node continues."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def sampled_tokens(self) -> int:
        """Number of tokens the policy sampled."""
        return sum(sum(node.loss_mask) for node in self.nodes)


class Task(Record):
    """One thing to do: a dataset line.

    Attributes:
        id: Stable name of the task inside its dataset, e.g. ``train/17``.
        data: The line itself; environments read it as ``options``.
    """

    id: str
    data: dict[str, Any]


class EpisodeBase(Record):
    """Everything of one attempt at one task but what was said.

    Attributes:
        group_id: Names the episodes that share a task for their advantage baseline.
        reward: Sum of the step rewards; ``None`` where the episode failed or the reward is missing.
        metrics: Numbers the environment reported (``accuracy``, ``format``), logged apart.
        drift: How far the stored ids are from what the chat template would render (``special``, ``text``); empty where
            it was not measured.
        stop_reason: Why it ended.
        error: What failed, with the traceback, where ``stop_reason`` is a failure.
    """

    group_id: str
    task_id: str
    index: int = Field(ge=0, description="Position inside the group.")
    seed: int
    reward: Annotated[float | None, Field(allow_inf_nan=False)] = None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    drift: dict[str, float] = {}
    stop_reason: StopReason
    error: str | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether this episode must not be trained on or counted as an answer."""
        return self.stop_reason in FAILURES or self.reward is None


class Episode(EpisodeBase):
    """One attempt at one task.

    Attributes:
        trajectories: Role -> its messages and tokens.
    """

    trajectories: dict[str, Trajectory] = {}
