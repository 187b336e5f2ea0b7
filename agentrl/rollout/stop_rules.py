"""Decides when a run has to stop because of its episodes: too many failed or were abandoned, or no learning signal.

Guarantees: no clock and no files; each kind of failure is logged once; the message that stops a run says how many
groups or episodes, of what kind, and what to change.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import EpisodeBase, StopReason
from agentrl.core.valid_text import printable
from agentrl.rollout.group_account import Tally

MOST_KINDS = 20  # distinct kinds of failures that are logged
LONGEST = 3000  # characters of a reason that are shown
MOST_REASONS = 200  # different reasons that are counted: texts may all differ, and a run may be long
log = logging.getLogger(__name__)


class StopRules:
    """Watches ended groups.

    Args:
        config: The recipe's rollout section.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._failures: Counter[str] = Counter()
        self._kinds: set[str] = set()  # kinds of failures that were logged
        self._recent: list[bool] = []  # whether each of the latest episodes failed
        self._uniform: list[Tally] = []  # groups filtered since the last kept one

    def check(self, episodes: Sequence[EpisodeBase], tally: Tally) -> str | None:
        """Takes an ended group into account; returns why the run has to stop, ``None`` if it goes on."""
        return self._failing(episodes) or self._without_signal(tally)

    def _failing(self, episodes: Sequence[EpisodeBase]) -> str | None:
        """Returns the reason if too many of the latest episodes (as many as a batch has) failed."""
        for episode in (one for one in episodes if one.stop_reason is not StopReason.STALE):
            self._recent.append(episode.failed)
            if episode.failed:
                self._note(episode)
        window = self._config.batch_size * self._config.group_size
        del self._recent[:-window]
        share = sum(self._recent) / window
        if share < self._config.max_failure_rate:
            return None
        text, count = self._failures.most_common(1)[0]
        return (
            f"{share:.0%} of the latest {window} episodes failed (rollout.max_failure_rate="
            f"{self._config.max_failure_rate:g}); the most frequent reason of the run, {count} times:\n"
            f"{text}"
        )

    def _note(self, episode: EpisodeBase) -> None:
        """Counts the reason of a failed episode, and logs it if it is the first of its kind."""
        reason = printable(f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}")
        kind = f"{episode.stop_reason} {reason.splitlines()[-1]}"
        reason = reason[-LONGEST:]
        if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
            self._kinds.add(kind)
            log.warning("the first episode that failed so (task %s): %s", episode.task_id, reason)
        self._failures[reason] += 1
        if len(self._failures) > MOST_REASONS:
            self._failures = Counter(dict(self._failures.most_common(MOST_REASONS // 2)))

    def _without_signal(self, tally: Tally) -> str | None:
        """Returns the reason if too many groups in a row were filtered; failed ones do not count."""
        if tally.outcome == "kept":
            self._uniform.clear()
        if tally.outcome != "filtered":
            return None
        self._uniform.append(tally)
        if len(self._uniform) != self._config.max_uniform_groups:  # said once: the groups that still run do not matter
            return None
        return (
            f"{len(self._uniform)} groups in a row had equal rewards (rollout.max_uniform_groups="
            f"{self._config.max_uniform_groups}, rollout.skip_uniform_groups=true): {diagnosis(self._uniform)}"
        )


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
    if every == len(uniform):
        return (
            "all solved. The policy solves every episode of these tasks, so nothing is left to learn from them. Use "
            "harder tasks, or a reward that still differs between right answers."
        )
    if none == len(uniform):
        return (
            f"none solved, the rewards are around {_mean_reward(uniform):g}. The tasks are too hard for the policy, or "
            "the reward does not depend on the answer. Try the reward by hand (agentrl env play), use easier tasks or "
            "a finer-grained reward, more episodes per task (rollout.group_size), or supervised training first."
        )
    return (
        f"{every} groups all solved, {none} none solved. No task is between the two: use tasks of medium difficulty, "
        "more episodes per task (rollout.group_size), or a finer-grained reward."
    )


def _mean_reward(tallies: Sequence[Tally]) -> float:
    rewards = [reward for tally in tallies for reward in tally.rewards]
    return round(sum(rewards) / len(rewards), 3) if rewards else 0.0
