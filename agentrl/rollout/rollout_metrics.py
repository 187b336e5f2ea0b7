"""Computes the metrics of the episodes that a step trains on.

Guarantees: only trained episodes are in these numbers; :mod:`agentrl.rollout.group_account` has those of all groups
that were drawn. A mean over no values is left out, not 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.config.recipe import RewardConfig
from agentrl.core.columns import FINISH_REASONS, Columns, concatenate
from agentrl.rollout.buffer import Group
from agentrl.rollout.group_account import is_uniform


def batch_metrics(groups: Sequence[Group], version: int, seen: RewardConfig) -> dict[str, float]:
    """Computes the metrics of a batch trained at policy ``version``; ``seen`` holds the trainer's reward transform."""
    columns = concatenate([group.columns for group in groups])
    episodes = columns.episodes
    metrics: dict[str, float] = {"rollout/episodes": float(len(episodes))}
    _add_mean(metrics, "rollout/groups_with_signal", [not is_uniform(group.columns.episodes, seen) for group in groups])
    for name in ("special", "text"):
        _add_mean(metrics, f"drift/{name}", [e.drift[name] for e in episodes if name in e.drift])
    _add_mean(metrics, "rollout/episode_seconds", [e.seconds for e in episodes])
    return metrics | _token_metrics(columns, version)


def _token_metrics(columns: Columns, version: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    answered = columns.finish != FINISH_REASONS.index(None)
    lengths = columns.sizes[answered].astype(float)
    _add_mean(metrics, "tokens/completion_mean", lengths)
    if len(lengths):
        metrics["tokens/completion_max"] = float(lengths.max())
    metrics["tokens/completion_total"] = float(lengths.sum())
    _add_mean(metrics, "tokens/truncated", columns.finish[answered] == FINISH_REASONS.index("length"))
    starts = columns.sampled_starts()
    if len(columns.teacher_logprobs):
        scored = np.repeat(columns.scored, columns.sampled_counts())
        _add_mean(metrics, "distill/reverse_kl", (columns.logprobs.astype(float) - columns.teacher_logprobs)[scored])
    oldest: dict[int, int] = {}
    for found in columns.trajectories():
        versions = columns.versions[starts[found.first] : starts[found.end]]
        if len(versions):
            oldest[found.episode] = min(int(versions.min()), oldest.get(found.episode, version))
    ages = [float(version - old) for old in oldest.values()]
    _add_mean(metrics, "staleness/mean", ages)
    if ages:
        metrics["staleness/max"] = max(ages)
    return metrics


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[float] | NDArray[Any]) -> None:
    if len(values):
        metrics[name] = float(np.mean(values))
