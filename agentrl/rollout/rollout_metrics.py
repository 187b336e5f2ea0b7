"""Computes the metrics of the episodes that a step trains on.

Guarantees: only trained episodes are in these numbers; :mod:`agentrl.rollout.group_account` has those of all groups
that were drawn. A mean over no values is left out, not 0. ``rollout/truncated`` is the share of episodes that were cut
(:mod:`agentrl.core.ending`), ``rollout/reward_truncated`` and ``rollout/reward_finished`` the mean reward of these and
of the others, ``rollout/ended_<reason>`` the share of each stop reason; ``tokens/truncated`` is the share of
answers, also those that the episode went on after.
"""

from collections.abc import Sequence

import numpy as np

from agentrl.config.baseline import Baseline, baseline_key
from agentrl.config.recipe import RewardConfig
from agentrl.core.columns import FINISH_REASONS, Columns, concatenate
from agentrl.core.ending import cut_episodes
from agentrl.core.episode import FAILURES, StopReason
from agentrl.rollout.buffer import Group
from agentrl.rollout.episode_size import oldest_versions
from agentrl.rollout.group_account import add_mean, compared

ENDINGS = [reason for reason in StopReason if reason not in FAILURES]


def batch_metrics(
    groups: Sequence[Group],
    version: int,
    seen: RewardConfig,
    baseline: Baseline = "role",
    columns: Columns | None = None,
) -> dict[str, float]:
    """Computes the metrics of a batch trained at policy ``version``.

    Args:
        groups: The batch.
        version: Policy version that the step starts from.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``.
        columns: The groups' columns, if they were concatenated before.
    """
    columns = concatenate([group.columns for group in groups]) if columns is None else columns
    episodes = columns.episodes
    metrics: dict[str, float] = {"rollout/episodes": float(len(episodes))}
    if groups:
        metrics["rollout/groups_with_signal"] = _share_with_signal(groups, seen, baseline)
    cut = cut_episodes(columns)
    add_mean(metrics, "rollout/truncated", cut)
    for name, those in (("truncated", True), ("finished", False)):
        found = [e.reward for e, one in zip(episodes, cut, strict=True) if one is those and e.reward is not None]
        add_mean(metrics, f"rollout/reward_{name}", found)
    for reason in ENDINGS:
        add_mean(metrics, f"rollout/ended_{reason}", [e.stop_reason is reason for e in episodes])
    for name in ("special", "text"):
        add_mean(metrics, f"drift/{name}", [e.drift[name] for e in episodes if name in e.drift])
    add_mean(metrics, "rollout/episode_seconds", [e.seconds for e in episodes])
    return metrics | _token_metrics(columns, version)


def _token_metrics(columns: Columns, version: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    answered = columns.finish != FINISH_REASONS.index(None)
    lengths = columns.sizes[answered].astype(float)
    add_mean(metrics, "tokens/completion_mean", lengths)
    if len(lengths):
        metrics["tokens/completion_max"] = float(lengths.max())
    metrics["tokens/completion_total"] = float(lengths.sum())
    add_mean(metrics, "tokens/truncated", columns.finish[answered] == FINISH_REASONS.index("length"))
    if len(columns.teacher_logprobs):
        scored = np.repeat(columns.scored, columns.sampled_counts())
        add_mean(metrics, "distill/reverse_kl", (columns.logprobs.astype(float) - columns.teacher_logprobs)[scored])
    ages = [float(max(0, version - oldest)) for oldest in oldest_versions(columns) if oldest is not None]
    add_mean(metrics, "staleness/mean", ages)
    if ages:
        metrics["staleness/max"] = max(ages)
    return metrics


def _share_with_signal(groups: Sequence[Group], seen: RewardConfig, baseline: Baseline) -> float:
    """Returns the fraction of the groups that have a reward with another one to differ from."""
    found = compared([episode for group in groups for episode in group.columns.episodes], seen, baseline)
    useful = {key for key, values in found.items() if len(values) > 1}
    with_signal = sum(
        any(
            baseline_key(episode, role, baseline) in useful
            for episode in group.columns.episodes
            for role in episode.roles
        )
        for group in groups
    )
    return with_signal / len(groups)
