"""A simulated accelerator that generates many sequences at a time.

Guarantees: while it runs, each of its ``n`` sequences gets a token every ``token + sequence * n`` seconds; nothing is
computed per token: the work that every sequence shares is one number, and one timer waits for the next end. Tokens that
were sampled before and after a push have their own versions. A cancelled sequence leaves at once; the tokens that it
made stay counted in :attr:`Device.tokens`.
"""

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

ROUNDING = 1e-6  # tokens; ends closer than this to now are now


@dataclass(frozen=True)
class Speed:
    """Seconds that a device takes.

    Attributes:
        token: Seconds of a token, however many sequences run.
        sequence: Seconds that each running sequence adds to every token.
        call: Seconds from a request to its first token, and of the answer's way back.
    """

    token: float = 0.006
    sequence: float = 0.00006
    call: float = 0.0

    def tokens_per_second(self, sequences: float) -> float:
        """Returns the tokens per second of one device with so many sequences."""
        return sequences / (self.token + self.sequence * sequences)


@dataclass
class Stretch:
    """Tokens in a row that one policy version sampled."""

    version: int
    tokens: int


@dataclass(eq=False)
class _Sequence:
    wanted: int
    done: "asyncio.Future[None]"
    start: float = 0.0  # in shared work
    marks: list[tuple[float, int]] = field(default_factory=list)  # shared work at which a version began
    active: bool = False


class Device:
    """One simulated inference device.

    Args:
        speed: Its speed.
        slots: Most sequences at a time; more wait in the order of their arrival. ``None``: any number.

    Attributes:
        version: Policy version that samples now.
        tokens: Tokens made so far, also those of sequences that were cancelled.
        cancelled: Tokens of sequences that were cancelled.
    """

    def __init__(self, speed: Speed, slots: int | None = None) -> None:
        self._speed = speed
        self._slots = slots
        self._work = 0.0  # tokens that a sequence from the very start would have
        self._at = 0.0
        self._active = 0
        self._paused = False
        self._ends: list[tuple[float, int, _Sequence]] = []
        self._waiting: deque[_Sequence] = deque()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.version = 0
        self.tokens = 0.0
        self.cancelled = 0.0

    async def generate(self, tokens: int) -> list[Stretch]:
        """Generate ``tokens`` tokens; fewer if :meth:`abort` ends it."""
        loop = asyncio.get_running_loop()
        one = _Sequence(tokens, loop.create_future())
        if self._slots is not None and self._active >= self._slots:
            self._waiting.append(one)
        else:
            self._advance()
            self._begin(one)
            self._set_timer()
        try:
            await one.done
        except asyncio.CancelledError:
            self._leave(one)
            raise
        return self._stretches(one)

    def pause(self) -> None:
        """Stop sampling; running sequences keep what they have."""
        self._advance()
        self._paused = True
        self._set_timer()

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._advance()
        self._paused = False
        self._set_timer()

    def set_version(self, version: int) -> None:
        """Sample with another policy version from now on."""
        self._advance()
        self.version = version
        for _, _, one in self._ends:
            if one.active:
                one.marks.append((self._work, version))

    def abort(self) -> None:
        """End all running sequences where they are; those that wait stay."""
        self._advance()
        ends, self._ends = self._ends, []
        for _, _, one in ends:
            if one.active:
                self._end(one)
        self._admit()
        self._set_timer()

    def _advance(self) -> None:
        """Bring the shared work up to now."""
        now = asyncio.get_running_loop().time()
        if self._active and not self._paused:
            made = (now - self._at) / (self._speed.token + self._speed.sequence * self._active)
            self._work += made
            self.tokens += made * self._active
        self._at = now

    def _begin(self, one: _Sequence) -> None:
        one.active, one.start = True, self._work
        one.marks.append((self._work, self.version))
        self._active += 1
        heapq.heappush(self._ends, (self._work + one.wanted, next(self._numbers), one))

    def _leave(self, one: _Sequence) -> None:
        if one.active:
            self._advance()
            one.active = False
            self._active -= 1
            self.cancelled += min(one.wanted, self._work - one.start)
            self._admit()
            self._set_timer()
        elif one in self._waiting:
            self._waiting.remove(one)

    def _end(self, one: _Sequence) -> None:
        one.active = False
        self._active -= 1
        one.marks.append((self._work, self.version))  # where it ended
        if not one.done.done():
            one.done.set_result(None)

    def _admit(self) -> None:
        while self._waiting and (self._slots is None or self._active < self._slots):
            self._begin(self._waiting.popleft())

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].active:  # it was cancelled
            heapq.heappop(self._ends)
        if self._ends and not self._paused:
            left = max(0.0, self._ends[0][0] - self._work)
            seconds = left * (self._speed.token + self._speed.sequence * self._active)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._next_end)

    def _next_end(self) -> None:
        self._timer = None
        self._advance()
        self._work = max(self._work, self._ends[0][0])  # the timer was for this end; only rounding is in between
        while self._ends and self._ends[0][0] <= self._work + ROUNDING:
            one = heapq.heappop(self._ends)[2]
            if one.active:
                self._end(one)
        self._admit()
        self._set_timer()

    def _stretches(self, one: _Sequence) -> list[Stretch]:
        """Returns the sequence's tokens by version, whole numbers that add up to what it made."""
        end = one.marks[-1][0]
        made = min(one.wanted, round(end - one.start))
        borders = [min(made, round(work - one.start)) for work, _ in one.marks[:-1]] + [made]
        found: list[Stretch] = []
        for (_, version), first, last in zip(one.marks, borders, borders[1:], strict=False):
            if last > first:
                found.append(Stretch(version, last - first))
        return found
