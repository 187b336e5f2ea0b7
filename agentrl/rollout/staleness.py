"""Admission: how many groups may be started without their data becoming too old.

Guarantees: pure arithmetic, no clock and no I/O. With ``eta`` the bound on staleness and ``B`` groups per step, a
group is admitted only while all groups admitted so far are consumed at most ``eta`` steps after the version that is
current now.
"""

from dataclasses import dataclass


@dataclass
class StalenessGate:
    """Counts groups; see the staleness control of AReaL (arXiv:2505.24298, eq. 3).

    Attributes:
        max_staleness: ``eta``, in trainer steps.
        batch_size: ``B``, groups per step.
        max_concurrent: Groups in flight at most.
        version: Current policy version.
        running: Groups in flight.
        accepted: Groups finished and kept, consumed ones included.
    """

    max_staleness: int
    batch_size: int
    max_concurrent: int
    version: int = 0
    running: int = 0
    accepted: int = 0

    def capacity(self) -> int:
        """Groups that may be started now; negative when admission ran ahead."""
        by_concurrency = self.max_concurrent - self.running
        by_staleness = (self.max_staleness + self.version + 1) * self.batch_size - (self.accepted + self.running)
        return min(by_concurrency, by_staleness)

    def start(self) -> None:
        """A group was started."""
        self.running += 1

    def finish(self, *, accepted: bool) -> None:
        """A group ended; one that is not accepted leaves room for another."""
        self.running -= 1
        self.accepted += int(accepted)

    def recover(self, version: int) -> None:
        """Continue after a restart at ``version``: its batches count as accepted, nothing runs."""
        self.version, self.running, self.accepted = version, 0, version * self.batch_size
