"""Stores the training data of finished episodes as arrays (columns) and serializes it to bytes.

Guarantees: :meth:`Columns.to_episodes` inverts :meth:`Columns.of`, except that messages, tasks and what else is there
for the record alone are dropped and logprobs are float32; the images of messages are kept once for each content, as the
bytes of their files; tokens keep the order of episodes, roles, messages and
positions; the bytes are a safetensors file, nothing is pickled; a missing reward stays missing (NaN in a column,
``None`` in a record).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from agentrl.core.episode import NOT_SAMPLED, Episode, EpisodeBase, Node, Trajectory
from agentrl.core.expert_rows import NONE_KNOWN, join
from agentrl.core.experts import ExpertRows, wide
from agentrl.core.images import image_bytes, images_of

FINISH_REASONS = (None, "stop", "length", "abort")
SAID = "said"  # name of the tensor that holds JSON
IMAGE = "image/"  # beginning of the names of tensors that hold images


class EpisodeRecord(EpisodeBase):
    """An episode without its messages and tokens.

    Attributes:
        roles: Role -> number of its messages.
        images: Messages whose tokens hold placeholders of images: index among the episode's messages, and names of the
            images in their order.
    """

    roles: dict[str, int]
    images: list[tuple[int, list[str]]] = Field(default=[])


class TrajectoryRange(NamedTuple):
    """Range of the messages of one role in one episode.

    Attributes:
        episode: Index of the episode.
        role: Name of the role.
        first: Index of the role's first message among all messages.
        end: Index after the role's last message.
    """

    episode: int
    role: str
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Columns:
    """Episodes as columns; a sampled token is one whose loss mask is set.

    Attributes:
        episodes: One record for each episode.
        parents: int32 ``[messages]``, index of the previous message within its trajectory; -1 for a first message.
        follows: int32 ``[messages]``, index of the answer, within its trajectory, that the conversation of a first
            message goes on from; -1 if not known, and for other messages.
        sizes: int32 ``[messages]``, number of tokens.
        finish: uint8 ``[messages]``, index into :data:`FINISH_REASONS`.
        rewards: float64 ``[messages]``, reward of the environment step whose action the message was; NaN without a
            reward.
        scored: bool ``[messages]``, whether a teacher scored the message.
        token_ids: int32 ``[tokens]``.
        loss_mask: bool ``[tokens]``, whether the policy sampled the token.
        logprobs: float32 ``[sampled]``, behavior logprobs.
        versions: int32 ``[sampled]``, policy version that sampled the token.
        teacher_logprobs: float32 ``[sampled]``, 0 for messages that no teacher scored; ``[0]`` if none was.
        experts: uint8 or uint16 ``[tokens, width]``, experts that the server chose for each token, as
            :func:`agentrl.core.expert_rows.narrow` stores them; ``[0, 0]`` if those of none are known.
        images: Name -> bytes of an image's file; names are digests of the bytes.
    """

    episodes: tuple[EpisodeRecord, ...]
    parents: NDArray[np.int32]
    follows: NDArray[np.int32]
    sizes: NDArray[np.int32]
    finish: NDArray[np.uint8]
    rewards: NDArray[np.float64]
    scored: NDArray[np.bool_]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    teacher_logprobs: NDArray[np.float32]
    experts: NDArray[Any] = field(default_factory=lambda: NONE_KNOWN)
    images: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> "Columns":
        """Converts episodes to columns."""
        images: dict[str, bytes] = {}
        nodes = [node for one in episodes for trajectory in one.trajectories.values() for node in trajectory.nodes]
        mask = _joined([node.loss_mask for node in nodes], np.bool_)
        taught = any(node.teacher_logprobs and any(node.loss_mask) for node in nodes)  # of sampled tokens alone
        teacher = [node.teacher_logprobs or [0.0] * len(node.token_ids) for node in nodes] if taught else []
        return cls(
            episodes=tuple(_record(one, images) for one in episodes),
            parents=np.array([-1 if node.parent is None else node.parent for node in nodes], np.int32),
            follows=np.array([-1 if node.follows is None else node.follows for node in nodes], np.int32),
            sizes=np.array([len(node.token_ids) for node in nodes], np.int32),
            finish=np.array([FINISH_REASONS.index(node.finish_reason) for node in nodes], np.uint8),
            rewards=np.array([np.nan if node.reward is None else node.reward for node in nodes], np.float64),
            scored=np.array([bool(node.teacher_logprobs) for node in nodes], np.bool_),
            token_ids=_joined([node.token_ids for node in nodes], np.int32),
            loss_mask=mask,
            logprobs=_joined([node.logprobs for node in nodes], np.float32)[mask],
            versions=_joined([node.versions for node in nodes], np.int32)[mask],
            teacher_logprobs=_joined(teacher, np.float32)[mask] if taught else np.zeros(0, np.float32),
            experts=join(
                [NONE_KNOWN if node.experts is None else node.experts.stored for node in nodes],
                [len(node.token_ids) for node in nodes],
            ),
            images=images,
        )

    @property
    def nbytes(self) -> int:
        """Size of all columns and images in bytes, without the records."""
        return sum(getattr(self, name).nbytes for name in COLUMNS) + sum(map(len, self.images.values()))

    def trajectories(self) -> Iterator[TrajectoryRange]:
        """Yields the message range of each role of each episode, in order."""
        first = 0
        for index, record in enumerate(self.episodes):
            for role, count in record.roles.items():
                yield TrajectoryRange(index, role, first, first + count)
                first += count

    def token_starts(self) -> NDArray[np.int64]:
        """Returns ``[messages + 1]``: index of each message's first token, then the number of tokens."""
        return _starts(self.sizes)

    def sampled_counts(self) -> NDArray[np.int64]:
        """Returns ``[messages]``: number of sampled tokens of each message."""
        return self._sampled_counts

    @cached_property
    def _sampled_counts(self) -> NDArray[np.int64]:
        before = _starts(self.loss_mask)
        starts = self.token_starts()
        return before[starts[1:]] - before[starts[:-1]]

    def sampled_starts(self) -> NDArray[np.int64]:
        """Returns ``[messages + 1]``: index of each message's first sampled token, then the number of them."""
        return _starts(self.sampled_counts())

    def sampled_ranges(self) -> list[tuple[int, int]]:
        """Returns the range of sampled tokens of each episode."""
        starts, found = self.sampled_starts().tolist(), [0]
        for record in self.episodes:
            found.append(found[-1] + sum(record.roles.values()))
        return [(starts[first], starts[end]) for first, end in pairwise(found)]

    def select(self, chosen: Sequence[bool]) -> "Columns":
        """Returns the columns of some episodes, in the same order.

        Args:
            chosen: ``[episodes]`` whether to take each episode.
        """
        if all(chosen):
            return self
        messages = np.repeat(np.array(chosen, bool), [sum(record.roles.values()) for record in self.episodes])
        tokens, sampled = np.repeat(messages, self.sizes), np.repeat(messages, self.sampled_counts())
        of_tokens, of_sampled = ("token_ids", "loss_mask", "experts"), ("logprobs", "versions", "teacher_logprobs")
        found: dict[str, NDArray[Any]] = {}
        for name in COLUMNS:
            mask = tokens if name in of_tokens else sampled if name in of_sampled else messages
            values = getattr(self, name)
            found[name] = values[mask] if len(values) else values
        records = tuple(one for one, own in zip(self.episodes, chosen, strict=True) if own)
        return Columns(records, **found, images=_used(records, self.images))

    def message_images(self) -> dict[int, tuple[bytes, ...]]:
        """Returns the images of each message whose tokens hold placeholders, by the message's index."""
        found: dict[int, tuple[bytes, ...]] = {}
        first = 0
        for record in self.episodes:
            found |= {first + index: tuple(self.images[name] for name in names) for index, names in record.images}
            first += sum(record.roles.values())
        return found

    def to_episodes(self) -> list[Episode]:
        """Converts the columns back to episodes, with empty messages."""
        tokens, sampled = self.token_starts(), self.sampled_starts()
        trajectories: list[dict[str, Trajectory]] = [{} for _ in self.episodes]
        for found in self.trajectories():
            nodes = [self._node(index, tokens, sampled) for index in range(found.first, found.end)]
            trajectories[found.episode][found.role] = Trajectory(nodes=nodes)
        return [
            Episode(**record.model_dump(exclude={"roles", "images"}), trajectories=of_one)
            for record, of_one in zip(self.episodes, trajectories, strict=True)
        ]

    def _node(self, index: int, tokens: NDArray[np.int64], sampled: NDArray[np.int64]) -> Node:
        here = slice(tokens[index], tokens[index + 1])
        own = slice(sampled[index], sampled[index + 1])
        mask = self.loss_mask[here]

        def spread(values: NDArray[Any], other: float) -> list[Any]:
            found = np.full(len(mask), other, values.dtype)
            found[mask] = values[own]
            return found.tolist()

        parent, follows, reward = int(self.parents[index]), int(self.follows[index]), float(self.rewards[index])
        return Node(
            parent=None if parent < 0 else parent,
            follows=None if follows < 0 else follows,
            message={},
            token_ids=self.token_ids[here].tolist(),
            loss_mask=mask.astype(int).tolist(),
            logprobs=spread(self.logprobs, 0.0),
            versions=spread(self.versions, NOT_SAMPLED),
            finish_reason=FINISH_REASONS[self.finish[index]],
            reward=None if np.isnan(reward) else reward,
            teacher_logprobs=spread(self.teacher_logprobs, 0.0) if self.scored[index] else [],
            experts=known_experts(self.experts[here]) if len(self.experts) else None,
        )

    def to_bytes(self, **more: Any) -> bytes:
        """Writes safetensors: one tensor per column, and one with the records and ``more`` as JSON bytes."""
        from safetensors.numpy import save

        said = b'{"episodes":%b,"more":%b}' % (_RECORDS.dump_json(self.episodes), json.dumps(more).encode())
        arrays = {name: getattr(self, name) for name in COLUMNS} | image_arrays(self.images)
        return save(arrays | {SAID: np.frombuffer(said, np.uint8)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "tuple[Columns, dict[str, Any]]":
        """Reads the columns and ``more`` that :meth:`to_bytes` wrote."""
        from safetensors.numpy import load

        arrays = load(data)
        said = from_array(arrays.pop(SAID))
        images = take_images(arrays)
        records = tuple(EpisodeRecord.model_validate(record) for record in said["episodes"])
        return cls(records, **arrays, images=images), said["more"]


_RECORDS = TypeAdapter(tuple[EpisodeRecord, ...])  # writes all records of a batch at once
_OF_RECORDS = tuple(EpisodeBase.model_fields)
_values_of_record = itemgetter(*_OF_RECORDS)
COLUMNS = tuple(one.name for one in fields(Columns) if one.name not in ("episodes", "images"))
_OF_MESSAGES = ("parents", "follows", "sizes", "finish", "rewards", "scored")  # columns with one entry a message


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Concatenates columns; episodes keep their order."""
    taught = any(len(part.teacher_logprobs) for part in parts)

    def column(name: str) -> NDArray[Any]:
        if name == "teacher_logprobs" and taught:  # parts without a teacher's logprobs get zeros
            return np.concatenate([_padded(part.teacher_logprobs, len(part.logprobs)) for part in parts])
        if name == "experts":
            return join([part.experts for part in parts], [len(part.token_ids) for part in parts])
        return np.concatenate([getattr(part, name) for part in parts])

    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Columns.of([])
    return Columns(
        episodes=tuple(record for part in parts for record in part.episodes),
        **{name: column(name) for name in COLUMNS},
        images={name: data for part in parts for name, data in part.images.items()},
    )


def split(columns: Columns) -> list[Columns]:
    """Splits columns into those of each episode; the arrays are views. The inverse of :func:`concatenate`."""
    tokens, sampled = columns.token_starts(), columns.sampled_starts()
    taught = len(columns.teacher_logprobs) > 0
    parts: list[Columns] = []
    first = 0
    for record in columns.episodes:
        end = first + sum(record.roles.values())
        messages = slice(first, end)
        own = slice(int(tokens[first]), int(tokens[end]))
        said = slice(int(sampled[first]), int(sampled[end]))
        parts.append(
            Columns(
                episodes=(record,),
                **{name: getattr(columns, name)[messages] for name in _OF_MESSAGES},
                token_ids=columns.token_ids[own],
                loss_mask=columns.loss_mask[own],
                logprobs=columns.logprobs[said],
                versions=columns.versions[said],
                teacher_logprobs=columns.teacher_logprobs[said] if taught else columns.teacher_logprobs,
                experts=columns.experts[own] if len(columns.experts) else columns.experts,
                images=_used((record,), columns.images),
            )
        )
        first = end
    return parts


def known_experts(stored: NDArray[Any]) -> ExpertRows | None:
    """Returns the experts of a message; ``None`` if those of no token are known."""
    experts = wide(stored)
    return ExpertRows.of(experts) if (experts >= 0).any() else None


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Encodes plain data as JSON in an array of bytes, so that it fits among tensors."""
    return np.frombuffer(json.dumps(data).encode(), np.uint8)


def from_array(array: NDArray[np.uint8]) -> Any:
    """Decodes the array of :func:`as_bytes`."""
    return json.loads(array.tobytes())


def image_arrays(images: Mapping[str, bytes]) -> dict[str, NDArray[np.uint8]]:
    """Returns images as tensors for a safetensors file; :func:`take_images` reads them."""
    return {IMAGE + name: np.frombuffer(data, np.uint8) for name, data in images.items()}


def take_images(arrays: dict[str, NDArray[Any]]) -> dict[str, bytes]:
    """Takes the images out of the tensors of a safetensors file."""
    names = [name for name in arrays if name.startswith(IMAGE)]
    return {name.removeprefix(IMAGE): arrays.pop(name).tobytes() for name in names}


def _used(records: Iterable[EpisodeRecord], images: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the images that some episodes hold."""
    return {name: images[name] for record in records for _, names in record.images for name in names}


def _record(episode: Episode, images: dict[str, bytes]) -> EpisodeRecord:
    """Makes the record of an episode, and adds its images to ``images``."""
    own = dict(zip(_OF_RECORDS, _values_of_record(vars(episode)), strict=True))
    own["roles"] = episode.roles
    own["images"] = []
    first = 0
    for trajectory in episode.trajectories.values():
        for index, urls in _images_by_node(trajectory.nodes).items():
            files = [image_bytes(url) for url in urls]
            names = [sha256(data).hexdigest() for data in files]
            images.update(zip(names, files, strict=True))
            own["images"].append((first + index, names))
        first += len(trajectory.nodes)
    return EpisodeRecord.of_checked(own)


def _images_by_node(nodes: Sequence[Node]) -> dict[int, list[str]]:
    """Returns the images of each node whose tokens hold their placeholders: of messages stored together, the last."""
    own = {index: found for index, node in enumerate(nodes) if (found := images_of(node.message))}
    if not own:
        return {}
    held: dict[int, list[str]] = {}
    for index, node in enumerate(nodes):
        before = nodes[node.parent] if node.parent is not None else None
        waits = before is not None and not before.token_ids and before.finish_reason is None
        images = [*(held.pop(node.parent, []) if waits and node.parent is not None else []), *own.get(index, [])]
        if images:
            held[index] = images
    return held


def _joined(lists: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
    found = np.empty(sum(map(len, lists)), dtype)
    start = 0
    for values in lists:
        found[start : start + len(values)] = values
        start += len(values)
    return found


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    found = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def _padded(values: NDArray[np.float32], length: int) -> NDArray[np.float32]:
    return values if len(values) == length else np.zeros(length, np.float32)
