"""Bounds the age of each episode at the moment it is trained.

The age of an episode is the step that trains it minus the policy version that sampled its oldest token: the number of
updates that its oldest token lags behind (staleness, in the project's vocabulary). It is not counted from the episode's
start: what was sampled decides how far off-policy an update is, and an episode that waits for its environment or for a
server ages only from its first token on. AReaL's ``eta`` (arXiv:2505.24298, eq. 3) limits how many groups are started
(:mod:`agentrl.rollout.staleness`); this limits what is trained.

Guarantees: pure, no clock and no I/O. With ``drop`` no episode is trained whose age exceeds the bound in force; with
``mask`` no token older than the bound carries a loss. A bound that was lowered comes into force when the groups that
were admitted under the older one have had their time, so it makes nothing stale. ``may_start`` is false while a group
started now could not be trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.rollout import RolloutConfig, StalePolicy
from agentrl.core.columns import Columns
from agentrl.rollout.episode_size import newest_versions, oldest_versions
from agentrl.rollout.group_account import Tally


@dataclass
class AgeBound:
    """The bound in force, and the step whose batch is handed out next.

    Attributes:
        policy: The recipe's ``rollout.stale``.
        bound: Largest age of a trained episode (``drop``) or token (``mask``), in trainer steps.
        most_in_row: The recipe's ``rollout.max_stale_groups``.
        step: Step that the next batch is for; a batch of step ``s`` updates the policy of version ``s``.
    """

    policy: StalePolicy
    bound: int
    most_in_row: int
    step: int = 0
    _falls: tuple[int, int] | None = field(default=None, init=False)  # step at which a lower bound holds, and the bound
    _in_row: int = field(default=0, init=False)  # groups that were stale although no step was taken meanwhile

    @classmethod
    def of(cls, config: RolloutConfig, bound: int) -> "AgeBound":
        """Returns the bound of a recipe's rollout section.

        Args:
            config: The section.
            bound: The bound to begin with: ``max_staleness``, or what stands for ``auto``.
        """
        return cls(config.stale, bound, config.max_stale_groups)

    @property
    def oldest(self) -> int:
        """Oldest policy version whose tokens are within the bound in the next batch."""
        return self.step - self.bound

    def too_old(self, version: int | None) -> bool:
        """Whether an episode whose oldest token has ``version`` can no longer be trained."""
        return self.policy == "drop" and version is not None and version < self.oldest

    def may_start(self, served: int) -> bool:
        """Whether a group that samples with the version ``served`` can be trained in the next batch or later."""
        return self.policy == "keep" or served >= self.oldest

    def stale(self, columns: Columns) -> list[bool]:
        """Returns for each episode of a group whether it cannot be trained.

        With ``mask`` an episode of which no token may carry a loss still counts in its group's baseline, unless no
        token of the whole group may.
        """
        young = not len(columns.versions) or int(columns.versions.min()) >= self.oldest
        if self.policy == "keep" or young:
            return [False] * len(columns.episodes)
        if self.policy == "mask":
            newest = [version for version in newest_versions(columns) if version is not None]
            return [max(newest) < self.oldest] * len(columns.episodes)
        return [self.too_old(version) for version in oldest_versions(columns)]

    def advance(self, step: int) -> None:
        """Note the step that the next batch is for."""
        self.step = step
        if self._falls is not None and step >= self._falls[0]:
            self.bound, self._falls = self._falls[1], None

    def change(self, bound: int) -> None:
        """Use another bound: at once if it is higher, else when no group is left that was admitted under the old one.

        Args:
            bound: The bound, in trainer steps.
        """
        self._falls = None
        if bound >= self.bound:
            self.bound = bound
        else:
            self._falls = self.step + self.bound, bound

    def state(self) -> dict[str, Any]:
        """Returns the bound in force and the lower one that follows, as plain data."""
        return {"bound": self.bound, "falls": self._falls}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the bounds of a :meth:`state`; call before :meth:`advance`."""
        self.bound = state["bound"]
        self._falls = None if state["falls"] is None else tuple(state["falls"])

    def starved(self, tally: Tally, started: int) -> str | None:
        """Takes an ended group into account; returns why the run has to stop, ``None`` if it goes on.

        A group that grew too old because batches of other groups were trained meanwhile starves nobody. One that is too
        old although no step was taken since its start will be so again: its servers sample with old versions.

        Args:
            tally: Counts of the group.
            started: Value of :attr:`step` when it was started.
        """
        if tally.outcome == "kept":
            self._in_row = 0
        if tally.outcome != "stale" or started != self.step:
            return None
        self._in_row += 1
        if self._in_row != self.most_in_row:  # said once: the groups that still run do not matter
            return None
        return (
            f"{self._in_row} groups in a row were too old to be trained (rollout.max_stale_groups="
            f"{self.most_in_row}), although no step was taken since they were started: {tally.reason}. "
            f"rollout.max_staleness={self.bound} with rollout.stale={self.policy} leaves nothing to train on at step "
            f"{self.step}. The servers sample with older versions than the ones that were pushed, or say so: look at "
            "`agentrl servers`; or raise rollout.max_staleness, or set rollout.stale=keep"
        )


def share_masked(columns: Sequence[Columns], oldest: int) -> float | None:
    """Returns the share of the sampled tokens that are older than the version ``oldest``; ``None`` without tokens."""
    counts = [(int((one.versions < oldest).sum()), len(one.versions)) for one in columns]
    total = sum(every for _, every in counts)
    return sum(old for old, _ in counts) / total if total else None
