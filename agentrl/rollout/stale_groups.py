"""Takes episodes that are too old out of groups that wait to be trained, and measures what that changes.

Guarantees: pure. What is left of a group is judged anew: a group with too few episodes, or without a difference in
reward where those are skipped, is left out as a whole. A metric of dropped episodes is absent in a step that dropped
none, and a mean is absent where nothing was measured: a cancelled episode has no reward.
"""

from collections.abc import Sequence
from dataclasses import replace

from agentrl.config.baseline import Baseline
from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.rollout.age_bound import AgeBound, share_masked
from agentrl.rollout.buffer import Group
from agentrl.rollout.episode_size import EpisodeSize, chosen_sizes, oldest_versions, sizes_of
from agentrl.rollout.group_account import Tally, add_mean, verdict


def without_stale(
    group: Group, bound: AgeBound, config: RolloutConfig, seen: RewardConfig, baseline: Baseline
) -> Group:
    """Returns a group without the episodes that are too old; its tally says whether the rest is kept.

    Args:
        group: A group that was kept.
        bound: Bound of the ages.
        config: The recipe's rollout section.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``.
    """
    if group.oldest is None or group.oldest >= bound.oldest:
        return group
    stale = bound.stale(group.columns)
    if not any(stale):
        return group
    rest = [one for one, old in zip(group.columns.episodes, stale, strict=True) if not old]
    before = group.tally
    old = chosen_sizes(group.columns, stale)
    outcome, reason = verdict(rest, len(before.dropped) + len(old), config, seen, baseline)
    dropped = (*before.dropped, *(sizes_of(group.columns) if outcome == "stale" else old))
    tally = replace(before, outcome=outcome, reason=reason, stale=_joined(before, stale), dropped=dropped)
    return Group(group.draw, group.columns.select([not old for old in stale]), tally)


def _joined(tally: Tally, stale: Sequence[bool]) -> tuple[bool, ...]:
    """Returns the flags of all episodes that did not fail, from those of the ones that were left before."""
    left = iter(stale)
    return tuple(old or next(left) for old in tally.stale or [False] * len(stale))


def age_metrics(bound: AgeBound, columns: Columns, dropped: Sequence[EpisodeSize]) -> dict[str, float]:
    """Computes what the bound does to a step's batch, and how the dropped episodes differ from the trained ones.

    Args:
        bound: Bound of the ages; its ``step`` is the one that trains the batch.
        columns: The batch.
        dropped: Sizes of the episodes that are not trained because of their age, counted by this step.
    """
    found: dict[str, float] = {"staleness/bound": float(bound.bound)}
    if bound.policy == "keep":
        versions = [version for version in oldest_versions(columns) if version is not None]
        add_mean(found, "staleness/over_bound", [version < bound.oldest for version in versions])
        return found
    if bound.policy == "mask":
        share = share_masked([columns], bound.oldest)
        if share is not None:
            found["staleness/masked"] = share
    tokens, kept = sum(one.tokens for one in dropped), len(columns.versions)
    found |= {"dropped/episodes": float(len(dropped)), "dropped/tokens": float(tokens)}
    if tokens + kept:
        found["dropped/tokens_share"] = tokens / (tokens + kept)
    for kind, sizes in (("dropped", dropped), ("trained", sizes_of(columns) if dropped else ())):
        add_mean(found, f"{kind}/tokens_mean", [one.tokens for one in sizes])
        add_mean(found, f"{kind}/turns_mean", [one.turns for one in sizes])
        add_mean(found, f"{kind}/reward_mean", [one.reward for one in sizes if one.reward is not None])
    return found
