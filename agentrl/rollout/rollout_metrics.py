"""Numbers about a batch of training episodes.

Guarantees: failed episodes are counted and enter no mean; a mean over nothing is left out, not 0.
"""

from collections.abc import Sequence

from agentrl.config.recipe import RewardConfig
from agentrl.core.episode import Episode
from agentrl.rollout.buffer import Group


def batch_metrics(groups: Sequence[Group], version: int, seen: RewardConfig) -> dict[str, float]:
    """Metrics of a batch that is consumed at policy ``version``; ``seen`` is how the trainer sees rewards."""
    episodes = [e for group in groups for e in group.episodes]
    failed = sum(group.failed for group in groups)
    rewards = [e.reward for e in episodes if e.reward is not None]
    metrics: dict[str, float] = {
        "rollout/episodes": float(len(episodes)),
        "rollout/failed": float(failed),
        "rollout/groups_with_signal": float(sum(not is_uniform(group.episodes, seen) for group in groups))
        / max(len(groups), 1),
    }
    _add_mean(metrics, "reward/mean", rewards)
    for name in sorted({name for e in episodes for name in e.metrics}):
        _add_mean(metrics, f"metrics/{name}", [e.metrics[name] for e in episodes if name in e.metrics])
    for name in ("special", "text"):
        _add_mean(metrics, f"drift/{name}", [e.drift[name] for e in episodes if name in e.drift])
    _add_mean(metrics, "rollout/episode_seconds", [e.seconds for e in episodes])
    nodes = [n for e in episodes for t in e.trajectories.values() for n in t.nodes if n.finish_reason is not None]
    lengths = [float(len(n.token_ids)) for n in nodes]
    _add_mean(metrics, "tokens/completion_mean", lengths)
    metrics["tokens/completion_max"] = max(lengths, default=0.0)
    metrics["tokens/completion_total"] = sum(lengths)
    _add_mean(metrics, "tokens/truncated", [float(n.finish_reason == "length") for n in nodes])
    gaps = [gap for n in nodes if n.teacher_logprobs for gap in n.teacher_gaps()]
    _add_mean(metrics, "distill/reverse_kl", gaps)
    ages = [float(version - old) for e in episodes if (old := e.oldest_version()) is not None]
    _add_mean(metrics, "staleness/mean", ages)
    metrics["staleness/max"] = max(ages, default=0.0)
    return metrics


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        metrics[name] = sum(values) / len(values)


def is_uniform(episodes: Sequence[Episode], seen: RewardConfig) -> bool:
    """Whether all rewards are equal to the trainer, so that the group teaches nothing."""
    return len({seen.seen(e.reward) for e in episodes if e.reward is not None}) <= 1
