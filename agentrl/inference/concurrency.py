"""Decides how many requests an API is sent at a time: fewer when it refuses, more while it answers.

Guarantees: at most ``limit`` requests are on the wire, never fewer than one is allowed; a refusal halves the limit,
once for all requests that were sent under the same limit; as many answers in a row as the limit raise it by one, up to
the most that is allowed (additive increase, multiplicative decrease, as in TCP). Requests go in the order in which they
were first asked, so none starves. While the API has said when to come back, none is sent.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Concurrency:
    """The limit of requests at a time; pure, time is an argument.

    Args:
        most: Largest number of requests at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = self.limit = self.lowest = max(1, most)
        self.running = 0
        self.epoch = 0  # counts the limits that were cut
        self._answers = 0  # since the limit last changed
        self._not_before = 0.0

    def delay(self, now: float) -> float | None:
        """Seconds until the next request may be sent, 0 for at once; ``None`` while all places are taken."""
        if self.running >= self.limit:
            return None
        return max(0.0, self._not_before - now)

    def answered(self) -> None:
        """Counts an answer."""
        self._answers += 1
        if self._answers >= self.limit < self.most:
            self.limit, self._answers = self.limit + 1, 0

    def refused(self, epoch: int, now: float, pause: float | None = None) -> None:
        """Counts a refusal because of too many requests.

        Args:
            epoch: Value of ``epoch`` when the request was sent.
            now: Time in seconds.
            pause: Seconds that the API asked to wait, if it did.
        """
        if pause is not None:
            self._not_before = max(self._not_before, now + pause)
        if epoch == self.epoch:
            self.limit, self._answers = max(1, self.limit // 2), 0
            self.lowest = min(self.lowest, self.limit)
            self.epoch += 1


class Gate:
    """Lets requests pass, as :class:`Concurrency` decides.

    Args:
        state: The decisions.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, state: Concurrency, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self.clock = clock
        self._tickets = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def ticket(self) -> int:
        """Returns the place of a request in the order; a repeated request keeps its own."""
        return next(self._tickets)

    async def enter(self, ticket: int) -> int:
        """Waits until a request may be sent; returns the epoch in which it is sent."""
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (ticket, self.ticket(), place))
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was let in, and is not going
                self.leave()
            raise
        return self.state.epoch

    def leave(self) -> None:
        """Frees the place of a request that ended."""
        self.state.running -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            if self._queue[0][2].done():  # its task was cancelled
                heapq.heappop(self._queue)
                continue
            delay = self.state.delay(self.clock())
            if delay is None:
                return
            if delay > 0:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(delay, self._woken)
                return
            self.state.running += 1
            heapq.heappop(self._queue)[2].set_result(None)

    def _woken(self) -> None:
        self._timer = None
        self._admit()


class Waits:
    """Seconds that an episode waited for an API that refused it or was busy; they are not the episode's own.

    Args:
        clock: Function that returns the time in seconds.

    Attributes:
        repeating: Seconds of them before a request was sent again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open, self._since, self._ended = 0, 0.0, 0.0
        self.repeating = 0.0

    @property
    def seconds(self) -> float:
        """Sum so far; what an episode waits for twice at a time counts once."""
        return self._ended + (self._clock() - self._since if self._open else 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waited."""
        if not self._open:
            self._since = self._clock()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._ended += self._clock() - self._since
