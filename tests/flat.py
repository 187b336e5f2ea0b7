"""A trajectory's branches as plain lists, through the columns that the trainer gets."""

from dataclasses import dataclass

from agentrl.core.columns import Columns
from agentrl.core.episode import NOT_SAMPLED, Episode, StopReason, Trajectory
from agentrl.train.branches import TokenColumns, branches_of, tokens_of


@dataclass
class Flat:
    """One branch; ``[tokens]`` each."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]


def as_episode(trajectory: Trajectory) -> Episode:
    """An episode that holds a trajectory."""
    return Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=0.0, stop_reason=StopReason.TERMINATED,
        trajectories={"assistant": trajectory},
    )  # fmt: skip


def flat_branches(trajectory: Trajectory) -> list[Flat]:
    """The branches that train a token."""
    columns = Columns.of([as_episode(trajectory)])
    tokens = TokenColumns.of(columns)
    found = []
    for branch in branches_of(columns):
        own = tokens_of(branch, tokens)
        count = len(own.token_ids)
        flat = Flat(own.token_ids.tolist(), [0] * count, [0.0] * count, [NOT_SAMPLED] * count)
        for position, index in zip(own.positions, own.own, strict=True):
            flat.loss_mask[position] = 1
            flat.logprobs[position] = float(columns.logprobs[index])
            flat.versions[position] = int(columns.versions[index])
        found.append(flat)
    return found
