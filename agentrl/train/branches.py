"""Branches: paths from a trajectory's first message to a leaf message, as indices into the batch's columns.

Guarantees: one branch for each leaf message; a sampled token that several branches share is trained only in the first
of them; tokens are not copied until a branch is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.columns import Columns
from agentrl.core.expert_rows import NONE_KNOWN


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """Tokens of a batch, or of one rank's part of it.

    Attributes:
        starts: int64 ``[messages + 1]`` index of each message's first token, then the number of tokens.
        sampled_starts: int64 ``[messages + 1]`` index of each message's first sampled token among all sampled tokens,
            then the number of sampled tokens.
        token_ids: int32 ``[tokens]``.
        loss_mask: bool ``[tokens]``, whether the policy sampled the token.
        sampled: Columns ``[sampled]`` by name: ``behavior`` (logprobs), ``versions``, and after they are computed
            ``teacher`` (logprobs), ``advantages``, ``values`` and ``returns``.
        places: int64 ``[messages]`` index of each message's first sampled token in the global batch.
        turns: int32 ``[messages]`` number of the turn within its trajectory; -1 if the message was not sampled.
        total: Number of sampled tokens of the global batch.
        images: Message whose tokens hold placeholders -> bytes of its images' files, in order.
        experts: ``[tokens, width]`` stored experts of each token; ``[0, 0]`` if they are not replayed.
    """

    starts: NDArray[np.int64]
    sampled_starts: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    sampled: dict[str, NDArray[Any]]
    places: NDArray[np.int64]
    turns: NDArray[np.int32]
    total: int
    images: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    experts: NDArray[Any] = field(default_factory=lambda: NONE_KNOWN)

    @classmethod
    def of(cls, columns: Columns) -> "TokenColumns":
        """Returns the tokens of a whole batch."""
        sampled_starts = columns.sampled_starts()
        turns = np.full(len(columns.sizes), -1, np.int32)
        for found in columns.trajectories():
            own = np.flatnonzero(np.diff(sampled_starts[found.first : found.end + 1]))
            turns[found.first + own] = np.arange(len(own))
        sampled: dict[str, NDArray[Any]] = {"behavior": columns.logprobs, "versions": columns.versions}
        if len(columns.teacher_logprobs):
            sampled["teacher"] = columns.teacher_logprobs
        return cls(
            starts=columns.token_starts(),
            sampled_starts=sampled_starts,
            token_ids=columns.token_ids,
            loss_mask=columns.loss_mask,
            sampled=sampled,
            places=sampled_starts[:-1],
            turns=turns,
            total=int(sampled_starts[-1]),
            images=columns.message_images(),
            experts=columns.experts,
        )

    def select(self, messages: Sequence[int]) -> "TokenColumns":
        """Returns the columns of the given messages alone, renumbered in the given order."""
        chosen = np.asarray(messages, np.int64)
        tokens = _ranges(self.starts[:-1][chosen], self.starts[1:][chosen])
        own = _ranges(self.sampled_starts[:-1][chosen], self.sampled_starts[1:][chosen])
        return TokenColumns(
            starts=_offsets(np.diff(self.starts)[chosen]),
            sampled_starts=_offsets(np.diff(self.sampled_starts)[chosen]),
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            sampled={name: values[own] for name, values in self.sampled.items()},
            places=self.places[chosen],
            turns=self.turns[chosen],
            total=self.total,
            images={new: self.images[old] for new, old in enumerate(messages) if old in self.images},
            experts=self.experts[tokens] if len(self.experts) else self.experts,
        )


@dataclass(frozen=True)
class Branch:
    """One path from a trajectory's first message to a leaf message.

    Attributes:
        messages: Indices of its messages in order.
        trained: For each message, whether its sampled tokens are trained in this branch.
        trajectory: Number of the trajectory in the batch.
        group: Number of the episode's group; an optimizer update takes whole groups.
        weight: Weight of each of its tokens in the loss, before the normalizer.
        number: Number of the branch in the batch, by which losses tell sequences apart.
        bootstrap: Place of an extra position after the last token, for the bootstrap value; ``None`` without one.
    """

    messages: tuple[int, ...]
    trained: tuple[bool, ...]
    trajectory: int = 0
    group: int = 0
    weight: float = 1.0
    number: int = 0
    bootstrap: int | None = None


@dataclass(frozen=True, eq=False)
class BranchTokens:
    """The token arrays of one branch.

    Attributes:
        token_ids: int32 ``[tokens]``.
        positions: int64 ``[trained]`` position of each trained token in the branch.
        own: int64 ``[trained]`` index of each trained token into the columns of sampled tokens.
        places: int64 ``[trained]`` index of each trained token in the global batch.
        turns: int32 ``[trained]`` turn of each trained token.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    own: NDArray[np.int64]
    places: NDArray[np.int64]
    turns: NDArray[np.int32]


def token_ids(branch: Branch, tokens: TokenColumns) -> NDArray[np.int32]:
    """Returns the ``[tokens]`` ids of a branch; a view if its messages are contiguous in the columns."""
    ids = tokens.token_ids
    parts = [ids[first:end] for first, end in _spans(branch, tokens)]
    found = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return found if branch.bootstrap is None else np.append(found, np.int32(0))


def experts_of(branch: Branch, tokens: TokenColumns) -> NDArray[Any]:
    """Returns the ``[tokens, width]`` stored experts of a branch's tokens; a bootstrap position has those of none."""
    parts = [tokens.experts[first:end] for first, end in _spans(branch, tokens)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def trained_count(branch: Branch, tokens: TokenColumns) -> int:
    """Returns the number of trained tokens of a branch, its bootstrap position included."""
    starts = tokens.sampled_starts
    count = sum(int(starts[m + 1] - starts[m]) for m, own in zip(branch.messages, branch.trained, strict=True) if own)
    return count + (branch.bootstrap is not None)


def input_length(branch: Branch, tokens: TokenColumns) -> int:
    """Returns the number of tokens that must be computed: those before the last trained token."""
    if branch.bootstrap is not None:
        return sum(int(tokens.starts[m + 1] - tokens.starts[m]) for m in branch.messages)
    after = 0
    for message, trained in zip(reversed(branch.messages), reversed(branch.trained), strict=True):
        first, end = int(tokens.starts[message]), int(tokens.starts[message + 1])
        if trained and (mask := tokens.loss_mask[first:end]).any():
            before = sum(int(tokens.starts[m + 1] - tokens.starts[m]) for m in branch.messages) - after - (end - first)
            return before + int(np.flatnonzero(mask)[-1])
        after += end - first
    return 0


def tokens_of(branch: Branch, tokens: TokenColumns) -> BranchTokens:
    """Returns the token arrays of a branch."""
    positions, own, places, turns = [], [], [], []
    start = 0
    for message, trained in zip(branch.messages, branch.trained, strict=True):
        first, end = tokens.starts[message], tokens.starts[message + 1]
        if trained:
            here = np.flatnonzero(tokens.loss_mask[first:end])
            count = len(here)
            positions.append(start + here)
            own.append(np.arange(count) + tokens.sampled_starts[message])
            places.append(np.arange(count) + tokens.places[message])
            turns.append(np.full(count, tokens.turns[message], np.int32))
        start += int(end - first)
    if branch.bootstrap is not None:  # it has its own place and no entry in the columns
        positions.append(np.array([start]))
        own.append(np.array([0]))
        places.append(np.array([branch.bootstrap]))
        turns.append(np.array([-1], np.int32))
    return BranchTokens(token_ids(branch, tokens), *map(np.concatenate, (positions, own, places, turns)))


def trained_mask(branches: Sequence[Branch], tokens: TokenColumns) -> NDArray[np.bool_]:
    """Returns bool ``[sampled]``: which sampled tokens the given branches train."""
    found = np.zeros(len(tokens.sampled["behavior"]), bool)
    for branch in branches:
        for message, own in zip(branch.messages, branch.trained, strict=True):
            if own:
                found[tokens.sampled_starts[message] : tokens.sampled_starts[message + 1]] = True
    return found


def branches_of(columns: Columns) -> list[Branch]:
    """Returns all branches that train a token, in the order of their trajectories."""
    sampled = columns.sampled_counts() > 0
    groups: dict[str, int] = {}
    found: list[Branch] = []
    for number, trajectory in enumerate(columns.trajectories()):
        group = groups.setdefault(columns.episodes[trajectory.episode].group_id, len(groups))
        seen: set[int] = set()
        for path in paths(columns.parents[trajectory.first : trajectory.end].tolist()):
            messages = tuple(trajectory.first + index for index in path)
            trained = tuple(bool(sampled[message]) and message not in seen for message in messages)
            seen.update(messages)
            if any(trained):
                found.append(Branch(messages, trained, number, group, number=len(found)))
    return found


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Returns the path from a first message to each leaf message; ``parents`` is -1 for a first message."""
    inner = set(parents)
    found: list[list[int]] = []
    for last in range(len(parents)):
        if last in inner:
            continue
        path = [last]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found


def _spans(branch: Branch, tokens: TokenColumns) -> list[tuple[int, int]]:
    """Returns the branch's ranges of tokens; adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for message in branch.messages:
        first, end = int(tokens.starts[message]), int(tokens.starts[message + 1])
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return found


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _ranges(firsts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenates the integers of all ranges."""
    counts = ends - firsts
    return np.repeat(firsts - _offsets(counts)[:-1], counts) + np.arange(counts.sum())
