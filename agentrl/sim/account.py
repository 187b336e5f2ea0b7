"""Counts what a simulated run generated, trained and threw away.

Guarantees: pure, no clock. A token is thrown away when its group has ended and no step trained it: the whole group was
filtered, dropped as too old or failed, its episode was, or a mask left the token out of the loss; or at once, when its
answer was cancelled: those are counted by the device (:mod:`agentrl.sim.device`). Tokens of groups that
run or wait in the buffer are neither trained nor thrown away yet. Memory does not grow with the number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.core.columns import Columns
from agentrl.core.episode import Episode
from agentrl.rollout.journal import GroupOutcome, Journal


@dataclass(frozen=True)
class Step:
    """One step of the simulated trainer.

    Attributes:
        end: Virtual time at which the servers hold the new version.
        waited: Seconds that the trainer waited for the batch.
        trained: Seconds that it trained.
        groups: Groups of the batch.
        tokens: Tokens with a loss.
        ages: Age of each episode that was trained: the step's version minus that of its oldest token with a loss.
        thrown: Tokens thrown away up to this step, those of cancelled answers included.
        generated: Tokens generated up to this step, by all servers.
    """

    end: float
    waited: float
    trained: float
    groups: int
    tokens: int
    ages: Sequence[int]
    thrown: float
    generated: float


@dataclass
class Account:
    """Counts the tokens of whole answers of groups, by task; each task is drawn once.

    Attributes:
        thrown: Tokens of whole answers thrown away so far.
    """

    thrown: int = 0
    _made: dict[str, int] = field(default_factory=dict)

    def made(self, task: str, tokens: int) -> None:
        """Count tokens that an episode of ``task`` sampled."""
        self._made[task] = self._made.get(task, 0) + tokens

    def lost(self, task: str) -> None:
        """Note that the group of ``task`` ended and is not trained."""
        self.thrown += self._made.pop(task, 0)

    def trained(self, columns: Columns) -> tuple[int, list[int]]:
        """Count a batch; returns its tokens with a loss, and the oldest version of each episode that has such."""
        tokens, oldest = 0, []
        by_task: dict[str, int] = {}
        starts, sampled = columns.token_starts(), columns.sampled_starts()
        for found in columns.trajectories():
            here = slice(starts[found.first], starts[found.end])
            kept = int(columns.token_ids[here][columns.loss_mask[here]].sum())
            versions = columns.versions[sampled[found.first] : sampled[found.end]]
            if len(versions):
                oldest.append(int(versions.min()))
            task = columns.episodes[found.episode].task_id
            by_task[task] = by_task.get(task, 0) + kept
            tokens += kept
        for task, kept in by_task.items():
            self.thrown += self._made.pop(task, kept) - kept
        return tokens, oldest


class AccountingJournal(Journal):
    """A journal that tells an account which groups are lost.

    Args:
        account: The account.
        folder: Folder to write into; ``None`` writes nothing.
        episodes: Whether to also write the episodes.
    """

    def __init__(self, account: Account, folder: Path | None = None, *, episodes: bool = False) -> None:
        super().__init__(folder or Path(), episodes=episodes)
        self._account = account
        self._writes = folder is not None

    def admitted(self, *, draw: int, task: str, seed: int, version: int) -> None:
        """Record that a group was admitted."""
        if self._writes:
            super().admitted(draw=draw, task=task, seed=seed, version=version)

    def group(self, outcome: GroupOutcome, *, draw: int, task: str, step: int, reason: str | None = None) -> None:
        """Record how a group ended."""
        if outcome != "trained":
            self._account.lost(task)
        super().group(outcome, draw=draw, task=task, step=step, reason=reason)

    def _append(self, record: dict[str, Any]) -> None:
        if self._writes:
            super()._append(record)

    def episode(self, episode: Episode, *, evaluation_step: int | None = None) -> Episode:
        """Record an episode, where episodes are written."""
        return super().episode(episode, evaluation_step=evaluation_step) if self._writes else episode
