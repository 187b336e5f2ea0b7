"""Episodes as data: messages, sampled tokens, rewards, and the reason for the end.

Guarantees: an episode is plain JSON data and refers to nothing in the process that made it. Messages form a graph: a
shared history is stored once, and a fork is a node with several children. Each node's per-token lists have equal
length. A missing reward is ``None``, never 0; a failed episode has a stop reason and no reward. Half of a surrogate
pair in a task or a record, which UTF-8 cannot hold, becomes U+FFFD.
"""

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.core.experts import ExpertRows
from agentrl.core.valid_text import valid_data

Message = dict[str, Any]
"""One chat message in OpenAI's shape: ``{"role": ..., "content": ...}``."""

NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled."""


class StopReason(StrEnum):
    """Reason why an episode ended."""

    TERMINATED = "terminated"  # the environment returned terminated=True
    LENGTH = "length"  # the environment ended the episode after an answer that was cut at its length limit
    TRUNCATED = "truncated"  # a limit of the environment or the workflow was reached
    CONTEXT_OVERFLOW = "context_overflow"  # the next prompt does not fit the context; failed if it was the first
    TIMEOUT = "timeout"  # the episode's deadline passed; failed if what there was could not be judged
    ENVIRONMENT_ERROR = "environment_error"  # reset, step or the reward function raised
    AGENT_ERROR = "agent_error"  # the agent raised
    INFERENCE_ERROR = "inference_error"  # the server refused, or could not be reached
    STALE = "stale"  # cancelled while it ran: it had become too old to be trained (rollout.max_staleness)
    INFRASTRUCTURE_ERROR = "infrastructure_error"  # what the environment or the agent runs on failed: a sandbox, a host
    CANCELLED = "cancelled"  # its group was complete without it (rollout.group_extra)
    WORKER_LOST = "worker_lost"  # the process that ran it ended or fell silent (rollout.workers)


FAILURES = frozenset(
    {
        StopReason.ENVIRONMENT_ERROR,
        StopReason.AGENT_ERROR,
        StopReason.INFERENCE_ERROR,
        StopReason.STALE,
        StopReason.INFRASTRUCTURE_ERROR,
        StopReason.CANCELLED,
        StopReason.WORKER_LOST,
    }
)
"""Stop reasons after which an episode has no reward and is never trained on."""

INFRASTRUCTURE = frozenset({StopReason.INFERENCE_ERROR, StopReason.INFRASTRUCTURE_ERROR, StopReason.WORKER_LOST})
"""Failures of the infrastructure, after which an episode may be tried again (``rollout.on_failure=retry``).

All others may be the policy's doing, or come again: a timeout of the episode (its answers may be long), an exception of
the environment or the agent, a missing reward, a first prompt that does not fit.
"""


_FIELDS: dict[type, set[str]] = {}  # names of all fields by class, for records that have values for all of them


class Record(BaseModel):
    """Base of data that is stored or sent; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of_checked(cls, values: dict[str, Any]) -> Self:
        """Makes a record of values that were checked before; ``model_construct`` in a tenth of the time.

        Args:
            values: Values of all fields, by name; the record keeps this dict.
        """
        names = _FIELDS.get(cls)
        if names is None:
            names = _FIELDS[cls] = set(cls.model_fields)
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", names)  # all: a field that is set later is in it already
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


class Node(Record):
    """One message in a trajectory, with its tokens.

    Attributes:
        parent: Index of the previous node, ``None`` for a root.
        message: The message in OpenAI's shape.
        token_ids: ``[tokens]`` ids as the engine read or sampled them; empty if the server returns none.
        loss_mask: ``[tokens]`` 1 for tokens that the policy sampled, else 0.
        logprobs: ``[tokens]`` behavior logprob, ``log_softmax(logits / T)``; 0.0 where the mask is 0.
        versions: ``[tokens]`` policy version that sampled the token, :data:`NOT_SAMPLED` where the mask is 0.
        finish_reason: Finish reason of a sampled message, as the server gave it: ``stop``, ``length`` or ``abort``.
        reward: Reward of the environment step whose action this message was; ``None`` without one.
        teacher_logprobs: ``[tokens]`` logprob of each sampled token under the teacher, 0.0 where the mask is 0; empty
            if no teacher scored the message.
        follows: Index of the answer that a first message's conversation goes on from; ``None`` if that is not
            known, and for other messages.
        at: Time when the message was stored, in seconds since 1970.
        tools: Index of a conversation's tools in the trajectory's ``tools``, at its first message.
        sampling: Sampling options that a sampled message's call set, by name; else ``None``.
        experts: Experts that the server's layers chose for each token, of a mixture of experts whose routing is
            replayed; ``None`` if they are not known. They are no part of the record.
        usage: Numbers of tokens of a sampled message's call as the API counted them: ``prompt``, ``completion``, and
            of these ``cached`` and ``reasoning``; ``None`` if it did not say. Of a call's several answers the first
            one has them.
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
    follows: int | None = None
    at: float | None = None
    tools: int | None = None
    sampling: dict[str, Any] | None = None
    usage: dict[str, int] | None = None
    experts: ExpertRows | None = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        """Refuses per-token lists of different lengths."""
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, loss_mask, logprobs and versions differ in length: {sorted(lengths)}")
        if self.teacher_logprobs and len(self.teacher_logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.teacher_logprobs)} teacher_logprobs for {len(self.token_ids)} token_ids")
        if self.experts is not None and len(self.experts) != len(self.token_ids):
            raise ValueError(f"experts of {len(self.experts)} tokens for {len(self.token_ids)} token_ids")
        return self


class Trajectory(Record):
    """All messages that one role read or sampled in an episode, as a graph.

    Attributes:
        nodes: Messages in the order in which they were stored. A conversation is the way from a node without a parent
            to one without children; one that the agent shortened or began anew has a first message of its own.
        tools: Sets of tools that the role was offered, each once.
    """

    nodes: list[Node] = []
    tools: list[list[dict[str, Any]]] = []

    @model_validator(mode="before")
    @classmethod
    def fill_in_repeated(cls, given: Any) -> Any:
        """Reads a record in which a repeated message stands as ``{"same_as": index}``, see :meth:`shortened`."""
        nodes = given.get("nodes") if isinstance(given, dict) else None
        if not nodes or not isinstance(nodes[0], dict):
            return given
        messages = [node.get("message") or {} for node in nodes]
        same = [None if "role" in message else message.get("same_as") for message in messages]
        if not any(index is not None for index in same):
            return given
        full = [
            node if at is None else {**node, "message": nodes[at]["message"]}
            for at, node in zip(same, nodes, strict=True)
        ]
        return {**given, "nodes": full}

    def shortened(self) -> "Trajectory":
        """Returns a copy for a record: a message that several conversations hold stands in the first of them alone."""
        if sum(node.parent is None for node in self.nodes) < 2:
            return self
        first: dict[str, int] = {}
        found = [first.setdefault(repr(node.message), index) for index, node in enumerate(self.nodes)]
        nodes = [
            node if same == index else node.model_copy(update={"message": {"same_as": same}})
            for index, (node, same) in enumerate(zip(self.nodes, found, strict=True))
        ]
        return Trajectory.model_construct(nodes=nodes, tools=self.tools)

    def toolset(self, tools: str) -> int | None:
        """Returns the index of a set of tools, stored if it is new; ``None`` for an empty text.

        Args:
            tools: The tools as JSON.
        """
        if not tools:
            return None
        found = json.loads(tools)
        if found not in self.tools:
            self.tools.append(found)
        return self.tools.index(found)

    def path(self, index: int) -> list[int]:
        """Returns the indices from the root to ``index``, both included."""
        chain: list[int] = []
        step: int | None = index
        while step is not None:
            chain.append(step)
            step = self.nodes[step].parent
        return chain[::-1]

    def leaves(self) -> list[int]:
        """Returns the indices of the nodes without children."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]


class Task(Record):
    """A task: one row of a dataset.

    Attributes:
        id: Stable name of the task inside its dataset, e.g. ``train/17``.
        data: The row; environments get it as ``options``.
    """

    id: str
    data: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def replace_halves(cls, given: Any) -> Any:
        """Replaces halves of surrogate pairs in the row."""
        return valid_data(given)


class EpisodeBase(Record):
    """An episode without its messages: task, seed, reward, metrics and stop reason.

    Attributes:
        group_id: Name of the group: the episodes of one task, which share an advantage baseline.
        reward: Reward of the episode, shared by all roles without one of their own: the sum of the step rewards;
            ``None`` if the episode failed or the reward is missing. An episode that ran out of context keeps what its
            steps earned, and the environment's judgement of it.
        role_rewards: Role -> its own reward, of the roles that have one: a game's sides, say.
        tag: Kind of the task, see :func:`tag_of`; ``None`` without one.
        metrics: Numbers that the environment reported (``accuracy``, ``format``), logged separately from the reward.
        drift: Distance of the stored ids from the ids that the chat template would render (``special``, ``text``);
            empty if it was not measured.
        stop_reason: Reason why the episode ended.
        error: Error message, with traceback if ``stop_reason`` is a failure; also that of a ``close`` that raised or
            was cut, after which the episode keeps its reward.
        seconds: Duration, teardown included.
        abandoned: Whether the teardown was given up at its time limit: what the environment held may be left, and its
            task may still run.
    """

    group_id: str
    task_id: str
    index: int = Field(ge=0, description="Position inside the group.")
    seed: int
    reward: Annotated[float | None, Field(allow_inf_nan=False)] = None
    role_rewards: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    tag: str | None = None
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    drift: dict[str, float] = {}
    stop_reason: StopReason
    error: str | None = None
    seconds: float = 0.0
    abandoned: bool = False

    @model_validator(mode="before")
    @classmethod
    def replace_halves(cls, given: Any) -> Any:
        """Replaces halves of surrogate pairs in names and texts; messages come in through ``message_shape``."""
        if not isinstance(given, dict):
            return given
        rest = valid_data({name: value for name, value in given.items() if name != "trajectories"})  # at once: fast
        return rest if "trajectories" not in given else rest | {"trajectories": given["trajectories"]}

    @property
    def failed(self) -> bool:
        """Whether this episode must not be trained on or counted as an answer."""
        return self.stop_reason in FAILURES or self.reward is None

    def reward_of(self, role: str) -> float:
        """Returns the reward of a role: its own if it has one, else the episode's.

        Raises:
            ValueError: The episode has no reward.
        """
        if self.reward is None:
            raise ValueError(f"episode {self.index} of group {self.group_id} has no reward: {self.stop_reason}")
        return self.role_rewards.get(role, self.reward)


class Episode(EpisodeBase):
    """An episode: one attempt at one task.

    Attributes:
        task: The task's row, with its reference answer where it has one.
        started: Time of its start, ISO 8601 in UTC.
        version: Policy version that was served at its start.
        attempt: Number of earlier attempts at this episode, which the infrastructure failed.
        retried: Whether it failed and was tried again: it counts for nothing.
        sampling: Sampling set-up of the run, by name; a call may set options of its own (:class:`Node`).
        answer: The answer that the environment found, see :class:`~agentrl.core.workflow.Outcome`.
        trajectories: Role -> messages and tokens of the role.
    """

    task: dict[str, Any] = {}
    started: str | None = None
    version: int | None = None
    attempt: int = 0
    retried: bool = False
    sampling: dict[str, Any] = {}
    answer: str | None = None
    trajectories: dict[str, Trajectory] = {}

    @property
    def roles(self) -> dict[str, int]:
        """Role -> number of its messages."""
        return {role: len(trajectory.nodes) for role, trajectory in self.trajectories.items()}

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(sum(node.loss_mask) for one in self.trajectories.values() for node in one.nodes)

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest sampled token; ``None`` without one."""
        return oldest_version(self.trajectories.values())

    def conversation(self, role: str | None = None) -> list[Message]:
        """Returns the messages of a role up to its last one; of several branches that is the latest.

        Args:
            role: The role; by default ``assistant``, or the episode's first role if none has that name.

        Raises:
            KeyError: The episode has no such role.
        """
        if role is None:
            role = next((one for one in self.trajectories if one == "assistant"), next(iter(self.trajectories), None))
            if role is None:
                return []
        if role not in self.trajectories:
            raise KeyError(f"no role {role!r}; the episode's roles: {', '.join(self.trajectories) or 'none'}")
        trajectory = self.trajectories[role]
        return [trajectory.nodes[index].message for index in trajectory.path(len(trajectory.nodes) - 1)]


def tag_of(row: Mapping[str, Any]) -> str | None:
    """Returns the kind of a task: its row's ``tag``, a text or a whole number; ``None`` for any other.

    Args:
        row: The task's row.
    """
    tag = row.get("tag")
    if isinstance(tag, int) and not isinstance(tag, bool):
        return str(tag)
    return tag if isinstance(tag, str) else None


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Returns the policy version that sampled the oldest token of an episode; ``None`` without a sampled token.

    Args:
        trajectories: All trajectories of the episode.
    """
    found: list[int] = []
    for trajectory in trajectories:
        for node in trajectory.nodes:
            if sampled := set(node.versions) - {NOT_SAMPLED}:
                found.append(min(sampled))
                break  # later answers of a role are younger
    return min(found, default=None)
