"""Limits how many episodes run at a time, and says when another group can begin.

Guarantees: never more than ``limit`` episodes hold a place; one that ends frees its place at once, whatever its group
still does; a place goes to the waiting episode of the oldest draw, then of the lowest index. A group claims a place for
each member when it is admitted, and a claim ends with the member, so the members of a new group may have to wait for
places that older groups still hold. No clock, and no I/O; nothing waits while a place is free.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable


class Places:
    """Places of running episodes.

    Args:
        limit: Largest number of episodes at a time.
        ended: Called when a claim has ended.
    """

    def __init__(self, limit: int, ended: Callable[[], object]) -> None:
        self._limit = limit
        self._ended = ended
        self._claims: dict[int, set[int]] = {}  # draw -> members that run, or will
        self._claimed = 0
        self._running = 0
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []  # a heap; those that gave up stay in it
        self._numbers = itertools.count()  # an attempt that gave up and the next one of the same member are two

    @property
    def free(self) -> int:
        """Number of places that no admitted group has a claim on; negative when members wait for places."""
        return self._limit - self._claimed

    def claim(self, draw: int, members: int) -> None:
        """Claim a place for each member of a group that is admitted."""
        self._claims[draw] = set(range(members))
        self._claimed += members

    def forget(self, draw: int) -> None:
        """End the claims of a group whose members are all over, or never began."""
        self._claimed -= len(self._claims.pop(draw))

    def one(self, draw: int, index: int) -> "_Place":
        """Returns a context manager that holds a place while a member runs; another attempt claims one again."""
        return _Place(self, draw, index)

    def _end_claim(self, members: set[int], index: int) -> None:
        members.discard(index)
        self._claimed -= 1
        self._ended()

    async def _take(self, draw: int, index: int) -> None:
        if self._running < self._limit:  # then nobody waits
            self._running += 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (draw, index, next(self._numbers), place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given in the same moment
                self._give()
            raise

    def _give(self) -> None:
        """Hands a place to the next episode that waits."""
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._running -= 1


class _Place:
    """Place of a running member; a generator as context manager would take twice the time for each episode."""

    __slots__ = ("_draw", "_index", "_members", "_places")

    def __init__(self, places: Places, draw: int, index: int) -> None:
        self._places = places
        self._draw = draw
        self._index = index

    async def __aenter__(self) -> None:
        places, index = self._places, self._index
        self._members = members = places._claims[self._draw]
        places._claimed += index not in members
        members.add(index)
        try:
            await places._take(self._draw, index)
        except BaseException:
            places._end_claim(members, index)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._places._give()
        self._places._end_claim(self._members, self._index)
