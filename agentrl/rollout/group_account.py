"""Judges ended groups and counts them: kept, filtered, stale or failed, and the metrics of each step's groups.

Guarantees: pure, no I/O. Every group is counted in exactly one step: a kept one in the step that trains it, any other
in the next step after its end. ``rollout/groups_drawn`` is the sum of kept, filtered, stale and failed groups. A mean
is over all groups of the step, or says ``kept``, which is of the trained episodes alone; failed and cancelled episodes
are counted and in no mean; a mean over no values is left out, not 0.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.config.baseline import Baseline, baseline_key
from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import EpisodeRecord
from agentrl.core.ending import SUCCESS, counted_metrics, episode_cut
from agentrl.core.episode import FAILURES, Episode, EpisodeBase, StopReason
from agentrl.core.sent_episode import columns_of
from agentrl.rollout.episode_size import EpisodeSize, sizes_of
from agentrl.rollout.group_run import Oversampled

Outcome = Literal["kept", "filtered", "stale", "failed"]
Compared = dict[tuple[str, ...], set[float]]
ENDED = frozenset({StopReason.TERMINATED, StopReason.LENGTH})  # stop reasons of episodes that the environment ended
UNIFORM = "uniform rewards"  # reason of a group that was filtered for its rewards
NO_REWARD = "no_reward"  # kind of failure of an episode that ended well and got no reward


@dataclass(frozen=True)
class Tally:
    """Counts of one group.

    Attributes:
        outcome: Whether the group is trained on, was filtered, is too old, or failed as a whole.
        reason: Reason for an outcome other than kept.
        episodes: Number of episodes, failed ones included.
        failures: Kind of failure -> number of episodes.
        rewards: Rewards of the episodes that did not fail, as the environment gave them.
        role_rewards: Rewards by role of each episode that did not fail.
        own_roles: Roles that have a reward of their own in one of them.
        metrics: The environment's metrics of each episode that did not fail.
        cut: Whether each of them was cut (:mod:`agentrl.core.ending`).
        solve_rate: Share of the episodes that did not fail and solved the task; ``None`` if all failed.
        abandoned: Number of episodes whose teardown was given up at its limit.
        stale: Whether each of the episodes that did not fail is too old to be trained; empty if none is.
        dropped: Sizes of the episodes that are not trained because of an age, cancelled ones included: those that are
            too old, and all that did not fail of a group that is stale as a whole.
        retried: Number of attempts that failed and were tried again; they are in no other count.
        short: Whether the group has fewer usable episodes than ``rollout.group_size``.
    """

    outcome: Outcome
    reason: str = ""
    episodes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    role_rewards: tuple[dict[str, float], ...] = ()
    own_roles: frozenset[str] = frozenset()
    metrics: tuple[dict[str, float], ...] = ()
    cut: tuple[bool, ...] = ()
    solve_rate: float | None = None
    abandoned: int = 0
    stale: tuple[bool, ...] = ()
    dropped: tuple[EpisodeSize, ...] = ()
    retried: int = 0
    short: bool = False

    def of_trained(self) -> "Tally":
        """Returns the counts without the episodes that are too old."""
        if not any(self.stale):
            return self

        def rest(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(value for value, old in zip(values, self.stale, strict=True) if not old)

        names = ("rewards", "role_rewards", "metrics", "cut")
        return replace(self, stale=(), **{name: rest(getattr(self, name)) for name in names})


def least_members(config: RolloutConfig) -> int:
    """Returns how many episodes a group needs to be trained on."""
    if config.on_failure == "drop":
        return config.group_size
    return min(config.min_group, config.group_size)


def judge(
    episodes: Sequence[Episode],
    config: RolloutConfig,
    seen: RewardConfig,
    baseline: Baseline = "role",
    stale: Sequence[bool] = (),
) -> Tally:
    """Decides whether a group is trained on, and counts its episodes.

    Args:
        episodes: All episodes of the group.
        config: The recipe's rollout section.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``.
        stale: For each episode that did not fail, whether it is too old to be trained; empty if none is.
    """
    good = [episode for episode in episodes if not episode.failed]
    old = [one for one, too_old in zip(good, stale, strict=True) if too_old] if stale else []
    cancelled = [episode for episode in episodes if episode.stop_reason is StopReason.STALE]
    failed = [episode for episode in episodes if episode.failed and episode.stop_reason is not StopReason.STALE]
    usable = [one for one, too_old in zip(good, stale, strict=True) if not too_old] if stale else good
    outcome, reason = verdict(usable, len(old) + len(cancelled), config, seen, baseline)
    dropped = [*(good if outcome == "stale" else old), *cancelled]
    cut = tuple(episode_cut(episode) for episode in good)
    counted = counted_metrics([episode.metrics for episode in good], cut)
    solves = [
        solved(one.reward, found, config.solved_reward, ended=one.stop_reason in ENDED)
        for one, found in zip(good, counted, strict=True)
    ]
    return Tally(
        outcome,
        reason,
        episodes=len(episodes),
        failures=dict(Counter(failure_kind(episode) for episode in failed)),
        rewards=tuple(episode.reward for episode in good if episode.reward is not None),
        role_rewards=tuple({role: one.reward_of(role) for role in [*one.roles, *one.role_rewards]} for one in good),
        own_roles=frozenset(role for one in good for role in one.role_rewards),
        metrics=tuple(episode.metrics for episode in good),
        cut=cut,
        solve_rate=fmean(solves) if solves else None,
        abandoned=sum(episode.abandoned for episode in episodes),
        stale=tuple(stale) if old else (),
        dropped=tuple(sizes_of(columns_of(dropped))) if dropped else (),
        short=len(good) < config.group_size,
    )


def verdict(
    usable: Sequence[Episode | EpisodeRecord],
    stale: int,
    config: RolloutConfig,
    seen: RewardConfig,
    baseline: Baseline,
) -> tuple[Outcome, str]:
    """Decides whether a group is trained on; returns the outcome, and the reason for any other than ``kept``.

    Args:
        usable: Episodes that neither failed nor are too old.
        stale: Number of episodes that are too old.
        config: The recipe's rollout section.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``.
    """
    least = least_members(config)
    if len(usable) + stale < least:
        return "failed", f"{len(usable)} of {config.group_size} episodes usable"
    old = f"{stale} of {config.group_size} episodes are too old"
    if len(usable) < least:
        return "stale", old
    if config.skip_uniform_groups and is_uniform(usable, seen, baseline):
        return ("stale", f"{old}, uniform rewards without them") if stale else ("filtered", UNIFORM)
    return "kept", ""


def is_uniform(episodes: Sequence[Episode | EpisodeRecord], seen: RewardConfig, baseline: Baseline = "role") -> bool:
    """Whether a group gives no learning signal: no reward differs from one that it is compared with.

    Args:
        episodes: The group's episodes.
        seen: The trainer's reward transform.
        baseline: The recipe's ``trainer.baseline``; roles of a zero-sum game differ by role, never in their sum.
    """
    return all(len(values) <= 1 for values in compared(episodes, seen, baseline).values())


def compared(episodes: Sequence[Episode | EpisodeRecord], seen: RewardConfig, baseline: Baseline) -> Compared:
    """Returns the different rewards of each baseline, by its key, after the trainer's reward transform."""
    found: Compared = defaultdict(set)
    for episode in episodes:
        for role in episode.roles if episode.reward is not None else ():
            found[baseline_key(episode, role, baseline)].add(_rounded(seen.seen(episode.reward_of(role))))
    return found


@lru_cache(1024)  # most rewards are one of a few
def _rounded(reward: float) -> float:
    """Returns a reward to 12 digits and decimals: sums of the same step rewards in another order are equal to these."""
    return float(f"{round(reward, 12):.12g}")


def solved(reward: float | None, metrics: Mapping[str, float], solved_reward: float, *, ended: bool = True) -> bool:
    """Whether an episode that did not fail solved its task: its accuracy is 1, or else its reward is high enough.

    Without an accuracy, an episode that a limit ended solved nothing: its reward is what its steps earned until then.

    Args:
        reward: Reward of the episode.
        metrics: Metrics that it counts with, see :func:`~agentrl.core.ending.counted_metrics`.
        solved_reward: The recipe's ``rollout.solved_reward``.
        ended: Whether the environment itself ended the episode.
    """
    if SUCCESS in metrics:
        return metrics[SUCCESS] >= 1
    return ended and reward is not None and reward >= solved_reward


def failure_kind(episode: EpisodeBase) -> str:
    """Names the kind of a failed episode: its stop reason, or :data:`NO_REWARD`."""
    if episode.stop_reason in FAILURES or episode.error is not None:
        return episode.stop_reason.value
    return NO_REWARD


class GroupAccount:
    """Keeps the tallies of the groups that no step has counted yet."""

    def __init__(self) -> None:
        self._left_out: dict[int, Tally] = {}  # draw -> tally of a group that is not kept
        self._oversampled: list[Oversampled] = []

    def leave_out(self, draw: int, tally: Tally) -> None:
        """Note a group that was filtered, is too old or failed, for the next step."""
        self._left_out[draw] = tally

    def oversampled(self, lengths: Oversampled | None) -> None:
        """Note the lengths of a group whose stragglers were cancelled, for the next step."""
        if lengths is not None:
            self._oversampled.append(lengths)

    @property
    def uncounted(self) -> list[int]:
        """Draws of the filtered, stale and failed groups that no step has counted yet."""
        return sorted(self._left_out)

    def outcomes(self) -> str:
        """Says how many of the uncounted groups were left out for each reason."""
        reasons = Counter(f"{tally.outcome}: {tally.reason}" for tally in self._left_out.values())
        return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())

    def dropped(self, kept: Iterable[Tally]) -> list[EpisodeSize]:
        """Returns the sizes of the episodes that a step which trains the ``kept`` groups drops because of their age."""
        tallies = [*kept, *self._left_out.values()]
        return [size for tally in tallies for size in tally.dropped]

    def count(self, kept: Iterable[Tally]) -> dict[str, float]:
        """Returns the metrics of a step that trains the ``kept`` groups, and start the next step's count."""
        left_out, self._left_out = list(self._left_out.values()), {}
        lengths, self._oversampled = self._oversampled, []
        return step_metrics([*kept, *left_out]) | oversampling_metrics(lengths)


def step_metrics(tallies: Sequence[Tally]) -> dict[str, float]:
    """Computes the metrics of all groups that a step counts."""
    kept = [tally.of_trained() for tally in tallies if tally.outcome == "kept"]
    filtered = [tally for tally in tallies if tally.outcome == "filtered"]
    outcomes = Counter(tally.outcome for tally in tallies)
    failures: Counter[str] = Counter()
    for tally in tallies:
        failures.update(tally.failures)
    metrics: dict[str, float] = {
        "rollout/groups_drawn": float(len(tallies)),
        "rollout/groups_kept": float(len(kept)),
        "rollout/groups_failed": float(outcomes["failed"]),
        "rollout/groups_stale": float(outcomes["stale"]),
        "rollout/groups_filtered": float(len(filtered)),
        "rollout/filtered_all_solved": float(sum(tally.solve_rate == 1 for tally in filtered)),
        "rollout/filtered_none_solved": float(sum(tally.solve_rate == 0 for tally in filtered)),
        "rollout/episodes_drawn": float(sum(tally.episodes for tally in tallies)),
        "rollout/failed": float(failures.total()),
        "rollout/abandoned": float(sum(tally.abandoned for tally in tallies)),
        "rollout/retried": float(sum(tally.retried for tally in tallies)),
        "rollout/groups_short": float(sum(tally.short for tally in kept)),
    }
    metrics |= {f"rollout/failed_{kind}": float(count) for kind, count in sorted(failures.items())}
    rates = [tally.solve_rate for tally in tallies if tally.solve_rate is not None]
    add_mean(metrics, "rollout/all_solved", [rate == 1 for rate in rates])
    add_mean(metrics, "rollout/none_solved", [rate == 0 for rate in rates])
    add_mean(metrics, "reward/mean_drawn", [reward for tally in tallies for reward in tally.rewards])
    add_mean(metrics, "reward/mean_kept", [reward for tally in kept for reward in tally.rewards])
    for role in sorted({role for tally in tallies for role in tally.own_roles}):
        for end, of in (("drawn", tallies), ("kept", kept)):
            own = [rewards[role] for tally in of for rewards in tally.role_rewards if role in rewards]
            add_mean(metrics, f"reward/{role}/mean_{end}", own)
    return metrics | _reported("metrics", tallies) | _reported("metrics_kept", kept)


def oversampling_metrics(groups: Sequence[Oversampled]) -> dict[str, float]:
    """Computes how many members were cancelled because their group was complete, and the bias that this makes.

    A ratio is that of the trained episodes' mean to the mean of all that were started, in the groups that had
    stragglers. It is below 1 where the trained ones are shorter, and an upper limit: a straggler counts with what it
    had until it was cancelled.
    """
    cancelled = sum(len(group.cancelled_seconds) for group in groups)
    if not cancelled:
        return {}
    found = {
        "rollout/stragglers": float(cancelled),
        "rollout/straggler_tokens": float(sum(sum(group.cancelled_tokens) for group in groups)),
    }
    for name in ("seconds", "tokens"):
        kept = [value for group in groups for value in getattr(group, f"kept_{name}")]
        every = kept + [value for group in groups for value in getattr(group, f"cancelled_{name}")]
        if kept and sum(every) > 0:
            found[f"rollout/extra_{name}_ratio"] = fmean(kept) / fmean(every)
    return found


def _reported(prefix: str, tallies: Sequence[Tally]) -> dict[str, float]:
    """Averages each metric that the environment reported over the episodes that have it."""
    counted = counted_metrics(
        [metrics for tally in tallies for metrics in tally.metrics], [one for tally in tallies for one in tally.cut]
    )
    found: dict[str, list[float]] = {}
    for metrics in counted:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": fmean(values) for name, values in sorted(found.items())}


def add_mean(metrics: dict[str, float], name: str, values: Sequence[float] | NDArray[Any]) -> None:
    """Adds the mean of ``values`` to ``metrics``; nothing without values."""
    if len(values):
        metrics[name] = float(np.mean(values))
