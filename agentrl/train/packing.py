"""From episodes to micro-batches: a group's shared prompt is computed once, as the trunk of a tree.

A row holds one trunk (the tokens that all members of a group begin with and none of them trains) followed by the
members' own tokens. An attention mask lets a member see the trunk and itself only, and positions restart after the
trunk, so each token sees exactly what it would see alone.

Guarantees: each trained token appears once; the split into rows, micro-batches and ranks changes no token's inputs; all
ranks derive the same plan from the same sequences and get the same number of micro-batches (empty ones are filled up).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainSequence:
    """One branch of an episode, ready to train.

    Attributes:
        group: Sequences with equal group may share a trunk.
        token_ids: ``[tokens]``.
        loss_mask: ``[tokens]`` 1 where the token is trained.
        logprobs: ``[tokens]`` behavior logprobs.
        advantage: Of the whole sequence.
    """

    group: Hashable
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


@dataclass
class Row:
    """One packed row; all lists but the last four are ``[length]``.

    Attributes:
        token_ids: Inputs.
        positions: Position of each token in its own sequence.
        segments: 0 for the trunk, ``1..members`` after it.
        sources: ``[trained]`` index in the row whose hidden state predicts the target.
        targets: ``[trained]`` ids.
        logprobs: ``[trained]`` behavior logprobs.
        advantages: ``[trained]``.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)


def shared_prefix(sequences: Sequence[TrainSequence]) -> int:
    """Number of leading tokens that all sequences share and none trains."""
    limit = min(_first_trained(s) for s in sequences)
    first = sequences[0].token_ids
    for position in range(limit):
        if any(s.token_ids[position] != first[position] for s in sequences):
            return position
    return limit


def _first_trained(sequence: TrainSequence) -> int:
    mask = list(sequence.loss_mask)
    return mask.index(1) if 1 in mask else len(mask)


def _useful_length(sequence: TrainSequence) -> int:
    """Tokens up to the last trained one, without it: what follows, and its own embedding, predict nothing trained."""
    mask = list(sequence.loss_mask)
    return len(mask) - 1 - mask[::-1].index(1)


def build_rows(sequences: Sequence[TrainSequence], max_tokens: int) -> list[Row]:
    """Pack sequences by group into rows of at most ``max_tokens`` tokens (a longer sequence gets its own row)."""
    groups: dict[Hashable, list[TrainSequence]] = defaultdict(list)
    for sequence in sequences:
        if any(sequence.loss_mask):
            if sequence.loss_mask[0]:
                raise ValueError("the first token of a sequence cannot be trained: nothing predicts it")
            groups[sequence.group].append(sequence)
    rows: list[Row] = []
    for members in groups.values():
        trunk = shared_prefix(members)
        for part in _split(members, trunk, max_tokens):
            rows.append(_pack(part, trunk))
    return rows


def _split(members: list[TrainSequence], trunk: int, max_tokens: int) -> list[list[TrainSequence]]:
    parts: list[list[TrainSequence]] = []
    used = 0
    for member in members:
        length = _useful_length(member) - trunk
        if not parts or used + length > max_tokens:
            parts.append([])
            used = trunk
        parts[-1].append(member)
        used += length
    return parts


def _pack(members: list[TrainSequence], trunk: int) -> Row:
    row = Row(token_ids=list(members[0].token_ids[:trunk]), positions=list(range(trunk)), segments=[0] * trunk)
    for number, member in enumerate(members, start=1):
        offset = len(row) - trunk  # from a position in the member to its index in the row, past the trunk
        end = _useful_length(member)
        row.token_ids += member.token_ids[trunk:end]
        row.positions += range(trunk, end)
        row.segments += [number] * (end - trunk)
        for position, trained in enumerate(member.loss_mask):
            if trained:
                before = position - 1
                row.sources.append(before if before < trunk else before + offset)
                row.targets.append(member.token_ids[position])
                row.logprobs.append(member.logprobs[position])
                row.advantages.append(member.advantage)
    return row


def plan_microbatches(rows: Sequence[Row], ranks: int, max_tokens: int) -> list[list[list[Row]]]:
    """Share rows out to ranks, balanced by tokens, and cut each rank's share into padded micro-batches.

    Args:
        rows: All rows of the global batch.
        ranks: Number of trainer ranks.
        max_tokens: Budget of one micro-batch, padding included.

    Returns:
        ``[ranks][micro-batches][rows]``; every rank has the same number of micro-batches, some of which may be empty.
    """
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=len, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(row)
        loads[lightest] += len(row)
    plans = [_microbatches(share, max_tokens) for share in shares]
    count = max((len(plan) for plan in plans), default=0)
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def _microbatches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Rows come longest first, so the first of a micro-batch sets its padded width."""
    batches: list[list[Row]] = []
    for row in rows:
        if not batches or len(batches[-1][0]) * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
