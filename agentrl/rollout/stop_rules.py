"""Decides when a run has to stop because of its episodes: too many failed or were abandoned, or no learning signal.

Each attempt that ends is noted (:meth:`StopRules.note`), and each group (:meth:`StopRules.check`).

Guarantees: no clock and no files; each kind of failure is logged once; the message that stops a run says how many
groups or episodes, of what kind, and what to change.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import INFRASTRUCTURE, Episode, EpisodeBase, StopReason
from agentrl.rollout.failed_episodes import FILE
from agentrl.rollout.failure_kinds import kind_of, reason_of
from agentrl.rollout.group_account import UNIFORM, Tally, least_members

MOST_KINDS = 20  # distinct kinds of failures that are logged
MOST_REASONS = 200  # different reasons that are counted: texts may all differ, and a run may be long
FIRST_WARNING = 16  # groups without signal in a row that are warned of; then 32, 64, ...
log = logging.getLogger(__name__)


class StopRules:
    """Watches ended groups.

    Args:
        config: The recipe's rollout section.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._failures: Counter[str] = Counter()  # of each kind, in the whole run
        self._first: dict[str, str] = {}  # kind -> reason of its first episode
        self._row: Counter[str] = Counter()  # failures of the infrastructure since the last episode without one
        self._recent: list[bool] = []  # whether each of the latest episodes failed
        self._uniform: list[Tally] = []  # groups filtered since the last kept one
        self._failed = 0  # groups that failed as a whole since then

    def check(self, episodes: Sequence[EpisodeBase], tally: Tally) -> str | None:
        """Takes an ended group into account; returns why the run has to stop, ``None`` if it goes on."""
        return self._failing(episodes) or self._failed_as_a_whole(tally) or self._without_signal(tally)

    def _failing(self, episodes: Sequence[EpisodeBase]) -> str | None:
        """Returns the reason if too many of the latest episodes (as many as a batch has) failed."""
        for episode in (one for one in episodes if one.stop_reason is not StopReason.STALE):
            self._recent.append(episode.failed)
            if episode.failed:
                self._failures[self._known(episode)] += 1
        window = self._config.batch_size * self._config.group_size
        del self._recent[:-window]
        share = sum(self._recent) / window
        if share < self._config.max_failure_rate:
            return None
        return (
            f"{share:.0%} of the latest {window} episodes failed (rollout.max_failure_rate="
            f"{self._config.max_failure_rate:g}); {self._most_frequent()}"
        )

    def _most_frequent(self) -> str:
        kind, count = self._failures.most_common(1)[0]
        return f"the most frequent reason of the run, {count} times:\n{self._first[kind]}"

    def _failed_as_a_whole(self, tally: Tally) -> str | None:
        """Returns the reason if too many groups had too few usable episodes, and none was kept in between."""
        if tally.outcome == "kept":
            self._failed = 0
        if tally.outcome != "failed":
            return None
        self._failed += 1
        if self._failed != self._config.max_failed_groups or not self._failures:  # said once
            return None
        least = least_members(self._config)
        return (
            f"{self._failed} groups in a row failed, each with fewer than {least} of {self._config.group_size} usable "
            f"episodes (rollout.max_failed_groups={self._config.max_failed_groups}): nothing is left to train on, with "
            f"rollout.on_failure={self._config.on_failure} and rollout.min_group={self._config.min_group}; "
            f"{self._most_frequent()}"
        )

    def note(self, episode: Episode) -> str | None:
        """Takes an attempt that ended into account, retried ones too.

        Returns:
            Why the run has to stop, if that was the last of too many failures of the infrastructure in a row; else
            ``None``. A timeout says nothing of the infrastructure: it neither counts nor ends a row.
        """
        if episode.stop_reason in (StopReason.CANCELLED, StopReason.STALE):
            return None
        if episode.stop_reason not in INFRASTRUCTURE:
            if episode.stop_reason is not StopReason.TIMEOUT:
                self._row.clear()
            return None
        kind = self._known(episode)
        self._row[kind] += 1
        self._failures[kind] += episode.retried
        most = most_in_a_row(self._config)
        if self._row.total() != most:  # said once: the attempts that still run do not matter
            return None
        kinds = "\n".join(
            f"{count} times {kind}; the first:\n{self._first[kind]}" for kind, count in self._row.most_common()
        )
        return (
            f"the infrastructure failed {most} attempts in a row (rollout.max_failures_in_a_row): servers, sandboxes "
            f"or hosts are gone or refuse. Each is also in {FILE}:\n{kinds}"
        )

    def _known(self, episode: EpisodeBase) -> str:
        """Returns the kind of a failed episode; the reason of the first of its kind is logged and kept."""
        reason, kind = reason_of(episode), kind_of(episode)
        if kind not in self._first:
            if len(self._first) < MOST_KINDS:
                log.warning("the first episode that failed so (task %s): %s", episode.task_id, reason)
            if len(self._failures) >= MOST_REASONS:
                self._failures = Counter(dict(self._failures.most_common(MOST_REASONS // 2)))
                self._first = {one: why for one, why in self._first.items() if one in self._failures | self._row}
            self._first[kind] = reason
        return kind

    def _without_signal(self, tally: Tally) -> str | None:
        """Returns the reason if too many groups in a row were filtered; failed ones do not count."""
        if tally.outcome == "kept":
            self._uniform.clear()
        if tally.outcome != "filtered" or tally.reason != UNIFORM:
            return None
        self._uniform.append(tally)
        count = len(self._uniform)
        if count != self._config.max_uniform_groups:  # said once: the groups that still run do not matter
            if count >= FIRST_WARNING and count & (count - 1) == 0:
                log.warning("%d groups in a row had equal rewards: %s", count, diagnosis(self._uniform))
            return None
        return (
            f"{count} groups in a row had equal rewards (rollout.max_uniform_groups="
            f"{self._config.max_uniform_groups}, rollout.skip_uniform_groups=true): {diagnosis(self._uniform)}"
        )


def most_in_a_row(config: RolloutConfig) -> int:
    """Returns after how many failures of the infrastructure in a row a run stops."""
    return config.max_failures_in_a_row or 2 * config.max_concurrent


def too_many(abandoned: int, config: RolloutConfig) -> str | None:
    """Returns why a run has to stop, if too many abandoned tasks still run; else ``None``.

    Args:
        abandoned: Number of tasks that were abandoned and still run.
        config: The recipe's rollout section.
    """
    if abandoned < config.max_concurrent:
        return None
    return (
        f"{abandoned} episodes were abandoned and still run, as many as rollout.max_concurrent="
        f"{config.max_concurrent}: code of the environment, the agent or the workflow goes on after it was cancelled. "
        "Let it raise asyncio.CancelledError (no bare `except:` or `except BaseException:` around an await), and give "
        "blocking calls time limits of their own; the episodes' errors name the lines"
    )


def diagnosis(uniform: Sequence[Tally]) -> str:
    """Says what groups with equal rewards have in common, and what to change."""
    every = sum(tally.solve_rate == 1 for tally in uniform)
    none = sum(tally.solve_rate == 0 for tally in uniform)
    episodes = sum(len(tally.rewards) for tally in uniform)
    if every == len(uniform):
        return (
            f"all solved. The policy solves each of the {episodes} episodes of these {every} groups, so nothing is "
            "left to learn from them. Use harder tasks, or a reward that still differs between right answers."
        )
    if none == len(uniform):
        return (
            f"none solved, the rewards are around {_mean_reward(uniform):g}. None of the {episodes} episodes of these "
            f"{none} groups solves its task: the tasks are too hard for the policy, or the reward does not depend on "
            "the answer. Try the reward by hand (agentrl env play), use easier tasks or a finer-grained reward, more "
            "episodes per task (rollout.group_size), or supervised training first."
        )
    return (
        f"{every} groups all solved, {none} none solved, {len(uniform) - every - none} solved in part, each with equal "
        f"rewards. No task is between the two: use tasks of medium difficulty, "
        "more episodes per task (rollout.group_size), or a finer-grained reward."
    )


def _mean_reward(tallies: Sequence[Tally]) -> float:
    rewards = [reward for tally in tallies for reward in tally.rewards]
    return round(sum(rewards) / len(rewards), 3) if rewards else 0.0
