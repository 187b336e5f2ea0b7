"""Finds the smallest staleness bound that keeps the trainer fed (``rollout.max_staleness=auto``).

The trainer is fed while it waits for at most ``HUNGRY`` of its time. While it waits for more, the bound is raised by
one, as long as that makes it wait less: where generation is slower than training, no bound feeds the trainer. Then, and
while the trainer hardly waits, a smaller bound is tried; if the trainer then waits longer and is hungry, the bound goes
back up. Only waiting is compared: evaluations and checkpoints make steps longer, too. A try that failed is made again
only after twice as many steps as before.

Guarantees: pure: time comes in as seconds, nothing is read or written. The bound stays between 0 and ``MOST``, and
changes by one. A search that goes on from a checkpoint (:meth:`AutoBound.restored`) has the bound, the measurements and
the pauses that it had, and lets the pipeline fill up again before it measures.
"""

from dataclasses import dataclass, field
from typing import Any

START = 1  # the trainer works on one batch while the next one is sampled
MOST = 8
HUNGRY = 0.05  # share of the time that the trainer waits for batches, from which the bound is raised
FULL = 0.01  # share up to which a smaller bound is tried
WINDOW = 8  # steps that a share is taken over
HELPS = 0.05  # part of a step's time that a larger bound must save of the waiting to be kept
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
    _tried: tuple[int, float, float] | None = None  # bound before the latest change; seconds waited and of a step then
    _pauses: dict[int, int] = field(default_factory=dict)  # direction -> steps until it may be tried again
    _lengths: dict[int, int] = field(default_factory=dict)  # direction -> length of its next pause

    def state(self) -> dict[str, Any]:
        """Returns the state for :meth:`restored`, as plain data."""
        return {
            "bound": self.bound,
            "settling": self._settling,
            "waits": self._waits,
            "tried": self._tried,
            "pauses": list(self._pauses.items()),
            "lengths": list(self._lengths.items()),
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> "AutoBound":
        """Returns the search of a :meth:`state`."""
        return cls(
            state["bound"],
            max(state["settling"], state["bound"] + 1),  # the pipeline fills up again
            [(waited, seconds) for waited, seconds in state["waits"]],
            None if state["tried"] is None else tuple(state["tried"]),
            dict(state["pauses"]),
            dict(state["lengths"]),
        )

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
        waiting, length = (sum(ones) / WINDOW for ones in zip(*self._waits, strict=True))
        self._waits.clear()
        return self._decide(waiting, length)

    def _decide(self, waiting: float, length: float) -> str | None:
        """Decides by the mean seconds of waiting and of a whole step."""
        before, self._tried = self._tried, None
        share = waiting / length if length > 0 else 0.0
        said, hungry = f"the trainer waits for batches {share:.0%} of its time", share > HUNGRY
        if before is not None and hungry:
            old_bound, old_waiting, least = before[0], before[1], HELPS * before[2]
            if old_bound < self.bound and old_waiting - waiting < least:
                self._pause(+1)
                return self._change(-1, f"{said}, no less than before: generation is slower than training")
            fed_before = old_waiting <= HUNGRY * before[2]
            if old_bound > self.bound and (fed_before or waiting - old_waiting > least):
                self._pause(-1)
                return self._change(+1, f"{said}, more than before")
        if hungry and self.bound < MOST and +1 not in self._pauses:
            self._tried = self.bound, waiting, length
            return self._change(+1, said)
        if (share <= FULL or hungry) and self.bound > 0 and -1 not in self._pauses:
            self._tried = self.bound, waiting, length
            return self._change(-1, f"{said}, whatever the bound" if hungry else said)
        return None

    def _pause(self, way: int) -> None:
        length = self._lengths.get(way, PAUSE)
        self._pauses[way], self._lengths[way] = length, 2 * length

    def _change(self, by: int, why: str) -> str:
        self._settling = max(self.bound, self.bound + by) + 1
        self.bound += by
        return why
