"""Computes the metrics of a batch of training episodes.

Guarantees: failed episodes are counted and excluded from every mean; a mean over no values is left out, not 0.
``rollout/truncated`` is the share of episodes that were cut (:mod:`agentrl.core.ending`), ``rollout/ended_<reason>``
that of each stop reason; ``tokens/truncated`` is the share of answers, also those that the episode went on after.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.config.baseline import Baseline, baseline_key
from agentrl.config.recipe import RewardConfig
from agentrl.core.columns import FINISH_REASONS, Columns, EpisodeRecord, concatenate
from agentrl.core.ending import counted_metrics, cut_episodes
from agentrl.core.episode import FAILURES, Episode, StopReason
from agentrl.rollout.buffer import Group

ENDINGS = [reason for reason in StopReason if reason not in FAILURES]


def batch_metrics(
    groups: Sequence[Group], version: int, seen: RewardConfig, baseline: Baseline = "role"
) -> dict[str, float]:
    """Computes the metrics of a batch trained at policy ``version``.

    Args:
        groups: The batch.
        version: Policy version that the step starts from.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``.
    """
    columns = concatenate([group.columns for group in groups])
    episodes = columns.episodes
    rewards = [e.reward for e in episodes if e.reward is not None]
    metrics: dict[str, float] = {
        "rollout/episodes": float(len(episodes)),
        "rollout/failed": float(sum(group.failed for group in groups)),
        "rollout/groups_with_signal": _share_with_signal(groups, seen, baseline),
    }
    _add_mean(metrics, "reward/mean", rewards)
    for role in sorted({role for e in episodes for role in e.role_rewards}):
        own = [e.reward_of(role) for e in episodes if role in e.roles or role in e.role_rewards]
        _add_mean(metrics, f"reward/{role}/mean", own)
    cut = cut_episodes(columns)
    counted = counted_metrics(episodes, cut)
    for name in sorted({name for found in counted for name in found}):
        _add_mean(metrics, f"metrics/{name}", [found[name] for found in counted if name in found])
    _add_mean(metrics, "rollout/truncated", cut)
    for reason in ENDINGS:
        _add_mean(metrics, f"rollout/ended_{reason}", [e.stop_reason is reason for e in episodes])
    for name in ("special", "text"):
        _add_mean(metrics, f"drift/{name}", [e.drift[name] for e in episodes if name in e.drift])
    _add_mean(metrics, "rollout/episode_seconds", [e.seconds for e in episodes])
    return metrics | _token_metrics(columns, version)


def _token_metrics(columns: Columns, version: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    answered = columns.finish != FINISH_REASONS.index(None)
    lengths = columns.sizes[answered].astype(float)
    _add_mean(metrics, "tokens/completion_mean", lengths)
    metrics["tokens/completion_max"] = float(lengths.max(initial=0.0))
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
    metrics["staleness/max"] = max(ages, default=0.0)
    return metrics


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[float] | NDArray[Any]) -> None:
    if len(values):
        metrics[name] = float(np.mean(values))


def is_uniform(episodes: Sequence[Episode | EpisodeRecord], seen: RewardConfig, baseline: Baseline = "role") -> bool:
    """Whether a group gives no learning signal: no reward differs from one that it is compared with.

    Args:
        episodes: The group's episodes.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``; roles of a zero-sum game differ by role, never in their sum.
    """
    return all(len(values) <= 1 for values in _compared(episodes, seen, baseline).values())


Compared = dict[tuple[str, ...], set[float]]


def _compared(episodes: Sequence[Episode | EpisodeRecord], seen: RewardConfig, baseline: Baseline) -> Compared:
    """Returns the different rewards of each baseline, by its key."""
    found: Compared = defaultdict(set)
    for episode in episodes:
        for role in episode.roles if episode.reward is not None else ():
            found[baseline_key(episode, role, baseline)].add(seen.seen(episode.reward_of(role)))
    return found


def _share_with_signal(groups: Sequence[Group], seen: RewardConfig, baseline: Baseline) -> float:
    """Returns the fraction of the groups that have a reward with another one to differ from."""
    found = _compared([episode for group in groups for episode in group.columns.episodes], seen, baseline)
    useful = {key for key, values in found.items() if len(values) > 1}
    with_signal = sum(
        any(
            baseline_key(episode, role, baseline) in useful
            for episode in group.columns.episodes
            for role in episode.roles
        )
        for group in groups
    )
    return with_signal / max(len(groups), 1)
