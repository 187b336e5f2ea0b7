"""Finds the smallest staleness bound that keeps the trainer fed (``rollout.max_staleness=auto``).

The trainer is fed while it waits for at most ``HUNGRY`` of its time. While it waits for more, the bound is raised by
one, as long as that helps: where generation is slower than training, no bound feeds the trainer, and the smallest one
that waits as little as the larger ones is kept. While the trainer hardly waits, a smaller bound is tried; if the trainer
goes hungry, the bound goes back up. A try that failed is made again only after twice as many steps as before.

Guarantees: pure: time comes in as seconds, nothing is read or written. The bound stays between 0 and ``MOST``, and
changes by one.
"""

from dataclasses import dataclass, field

START = 1  # the trainer works on one batch while the next one is sampled
MOST = 8
HUNGRY = 0.05  # share of the time that the trainer waits for batches, from which the bound is raised
FULL = 0.01  # share up to which a smaller bound is tried
WINDOW = 8  # steps that a share is taken over
HELPS = 0.2  # part of the waiting that a larger bound must save to be kept
PAUSE = 32  # steps after a try that failed, before it is made again


@dataclass
class AutoBound:
    """State of the search.

    Attributes:
        bound: Bound to use now, in trainer steps.
    """

    bound: int = START
    _settling: int = START + 1  # steps that are not measured: the pipeline fills up
    _waits: list[tuple[float, float]] = field(default_factory=list)  # seconds waited, and of the whole step
    _tried: tuple[int, float] | None = None  # bound before the latest change, and its share
    _pauses: dict[int, int] = field(default_factory=dict)  # direction -> steps until it may be tried again
    _lengths: dict[int, int] = field(default_factory=dict)  # direction -> length of its next pause

    def observe(self, waited: float, seconds: float) -> str | None:
        """Takes a step into account; returns why the bound was changed, ``None`` if it was not.

        Args:
            waited: Seconds that the trainer waited for the step's batch.
            seconds: Seconds from the batch before to this one.
        """
        self._pauses = {way: left - 1 for way, left in self._pauses.items() if left > 1}
        if self._settling > 0:
            self._settling -= 1
            return None
        self._waits.append((waited, seconds))
        if len(self._waits) < WINDOW:
            return None
        total = sum(one for _, one in self._waits)
        share = sum(one for one, _ in self._waits) / total if total > 0 else 0.0
        self._waits.clear()
        return self._decide(share)

    def _decide(self, share: float) -> str | None:
        before, self._tried = self._tried, None
        said = f"the trainer waits for batches {share:.0%} of its time"
        if before is not None and before[0] < self.bound and share > (1 - HELPS) * before[1] and share > HUNGRY:
            self._pause(+1)
            return self._change(-1, share, f"{said}, and with the smaller bound {before[1]:.0%}: generation is slower")
        if before is not None and before[0] > self.bound and share > max(HUNGRY, before[1] / (1 - HELPS)):
            self._pause(-1)
            return self._change(+1, share, said)
        if share > HUNGRY and self.bound < MOST and +1 not in self._pauses:
            self._tried = self.bound, share
            return self._change(+1, share, said)
        if share <= FULL and self.bound > 0 and -1 not in self._pauses:
            self._tried = self.bound, share
            return self._change(-1, share, said)
        return None

    def _pause(self, way: int) -> None:
        length = self._lengths.get(way, PAUSE)
        self._pauses[way], self._lengths[way] = length, 2 * length

    def _change(self, by: int, share: float, why: str) -> str:
        self._settling = max(self.bound, self.bound + by) + 1
        self.bound += by
        return why
