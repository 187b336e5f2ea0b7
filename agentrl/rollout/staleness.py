"""Limits how many groups are started, so that the mean age of trained groups stays small.

The bound for a single episode is that of :mod:`agentrl.rollout.age_bound`.

Guarantees: pure arithmetic, no clock and no I/O. The age of a trained group is the number of steps between its start
and its training. With staleness bound ``eta`` and ``B`` groups per step, at most ``eta * B`` groups are under way
(running, or waiting to be trained) after a step, so the mean age of all groups trained so far is at most ``eta``. It is
no bound for a single group: one that runs for longer than the others is trained when it ends, however old it is. Only
if groups end in the order of their start is none older than ``eta``. How many episodes run at a time is limited by
:mod:`agentrl.rollout.places`.
"""

from dataclasses import dataclass


@dataclass
class StalenessGate:
    """Counts groups to bound their mean staleness, as AReaL does (arXiv:2505.24298, eq. 3).

    Attributes:
        max_staleness: Bound ``eta`` of the mean staleness, in trainer steps.
        batch_size: Number of groups per step, ``B``.
        version: Current policy version.
        running: Number of groups in flight.
        accepted: Number of groups finished and kept, including those already trained on.
    """

    max_staleness: int
    batch_size: int
    version: int = 0
    running: int = 0
    accepted: int = 0

    def capacity(self) -> int:
        """Returns how many groups may be started now; negative when too many were started already."""
        return (self.max_staleness + self.version + 1) * self.batch_size - (self.accepted + self.running)

    def start(self) -> None:
        """Count a started group."""
        self.running += 1

    def finish(self, *, accepted: bool) -> None:
        """Count a finished group; one that is not accepted leaves room for another."""
        self.running -= 1
        self.accepted += int(accepted)

    def withdraw(self) -> None:
        """Take back an accepted group that will not be trained: it leaves room for another."""
        self.accepted -= 1

    def recover(self, version: int) -> None:
        """Continue after a restart at ``version``: all batches before it count as accepted, no group runs."""
        self.version, self.running, self.accepted = version, 0, version * self.batch_size
