"""The lease of a pause, after which the engine resumes by itself.

Guarantees: a pause with a lease ends when the lease does, unless its holder renews it, so a client that died leaves no
server paused; while a lease runs, another holder can neither pause nor resume. A pause without a lease, as SGLang's
contract has it, lasts until someone resumes, and anyone may.
"""

import time
from collections.abc import Callable


class HeldError(RuntimeError):
    """The pause belongs to another client whose lease still runs. Becomes HTTP 409."""


class PauseLease:
    """Holder and end of the engine's pause; for one thread.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a lease."""
        self._clock = clock
        self._end: float | None = None
        self.holder = ""

    def take(self, holder: str, seconds: float | None) -> None:
        """Begin a lease; ``seconds`` is its length, ``None`` for a pause without a lease.

        Raises:
            HeldError: Another client's lease runs.
        """
        self.check(holder)
        self.holder = holder
        self._end = None if seconds is None else self._clock() + seconds

    def renew(self, holder: str, seconds: float) -> None:
        """Extend a lease.

        Raises:
            HeldError: ``holder`` has no lease any more.
        """
        if self._end is None or self.holder != holder:
            raise HeldError(f"{holder} holds no pause any more: its lease ended, or someone resumed")
        self._end = self._clock() + seconds

    def check(self, holder: str) -> None:
        """Does nothing if ``holder`` may change the pause; a client that names no holder always may.

        Raises:
            HeldError: Another client's lease runs.
        """
        left = self.left()
        if left and holder and self.holder and holder != self.holder:
            raise HeldError(f"paused by {self.holder}, whose lease ends in {left:.0f} s unless it is renewed")

    def drop(self) -> None:
        """End the lease together with its pause."""
        self.holder, self._end = "", None

    def left(self) -> float | None:
        """Seconds until the lease ends, at least 0; ``None`` without a lease."""
        return None if self._end is None else max(0.0, self._end - self._clock())
