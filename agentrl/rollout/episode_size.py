"""Measures episodes: sampled tokens, turns and reward, and the versions that sampled them.

Guarantees: pure; only tokens that the policy sampled count. An episode without one has no version.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.core.columns import Columns


@dataclass(frozen=True)
class EpisodeSize:
    """Size of one episode.

    Attributes:
        tokens: Number of sampled tokens.
        turns: Number of sampled messages, of all roles.
        reward: Its reward; ``None`` if it has none, as one that was cancelled.
    """

    tokens: int
    turns: int
    reward: float | None


def sizes_of(columns: Columns) -> list[EpisodeSize]:
    """Returns the size of each episode."""
    answered = [0, *np.cumsum(columns.sampled_counts() > 0).tolist()]
    found, first = [], 0
    for record, (begin, end) in zip(columns.episodes, columns.sampled_ranges(), strict=True):
        last = first + sum(record.roles.values())
        found.append(EpisodeSize(end - begin, answered[last] - answered[first], record.reward))
        first = last
    return found


def chosen_sizes(columns: Columns, chosen: Sequence[bool]) -> list[EpisodeSize]:
    """Returns the sizes of some episodes; ``chosen`` is ``[episodes]``."""
    return [size for size, own in zip(sizes_of(columns), chosen, strict=True) if own]


def oldest_versions(columns: Columns) -> list[int | None]:
    """Returns the oldest policy version that sampled a token of each episode; ``None`` without sampled tokens."""
    return _of_episodes(columns, np.minimum)


def newest_versions(columns: Columns) -> list[int | None]:
    """Returns the newest policy version that sampled a token of each episode; ``None`` without sampled tokens."""
    return _of_episodes(columns, np.maximum)


def _of_episodes(columns: Columns, chosen: np.ufunc) -> list[int | None]:
    """Reduces the versions of each episode's sampled tokens, which lie one after the other."""
    ranges = columns.sampled_ranges()
    starts = [first for first, end in ranges if end > first]
    found = iter(chosen.reduceat(columns.versions, starts).tolist() if starts else ())
    return [next(found) if end > first else None for first, end in ranges]
