"""Assigns requests to slots; it needs no model, clock or thread.

Guarantees: running requests fill slots 0..B-1 without a hole, and together never have more tokens than allowed; a
request is in exactly one of waiting, running, finished; requests are admitted in order of arrival, except that those
with the very same prefix as the head come along with it (one prefill serves them all); a retracted request goes back
before every newer one.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from agentrl.engine.request import Request


class Scheduler:
    """Slots and the queue before them.

    Args:
        max_running: Number of slots.
        max_tokens: Most tokens of all running requests together, each counted as long as it may become; ``None`` for
            no bound. A request that needs more by itself never runs: refuse it before.
    """

    def __init__(self, max_running: int, max_tokens: int | None = None) -> None:
        """Start empty."""
        self.max_running = max_running
        self.max_tokens = max_tokens
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    @property
    def unfinished(self) -> list[Request]:
        """All requests, running ones first."""
        return [*self.running, *self.waiting]

    def add(self, requests: Iterable[Request]) -> None:
        """Queue new requests."""
        for request in requests:
            request.enqueue()
            self.waiting.append(request)

    def next_group(self, *, taken: Sequence[Request] = (), plain_only: bool = False) -> list[Request]:
        """Take the head of the queue and its duplicates, as many as there is room for; empty if none can run.

        Requests that want prompt logprobs join too: the caller prefills with scoring if any of the group asks for it.

        Args:
            taken: Requests that were taken before and are not placed yet.
            plain_only: Leave a head that wants prompt logprobs, or has a duplicate that does, where it is.
        """
        slots = self.max_running - len(self.running) - len(taken)
        if slots <= 0 or not self.waiting:
            return []
        head = self.waiting[0]
        group = [r for r in self.waiting if r.prefix_hash == head.prefix_hash and r.prefix == head.prefix][:slots]
        group = group[: self._that_fit(group, taken)]
        if plain_only and any(r.needs_prompt_logprobs for r in group):
            return []
        gone = set(map(id, group))
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        return group

    def _that_fit(self, group: Sequence[Request], taken: Sequence[Request]) -> int:
        """Number of a group's requests that the token budget allows."""
        if self.max_tokens is None:
            return len(group)
        used = sum(request.footprint for request in (*self.running, *taken))
        return bisect.bisect_right(list(itertools.accumulate(r.footprint for r in group)), self.max_tokens - used)

    def put_back(self, group: Iterable[Request]) -> None:
        """Return requests to the front of the queue, as if they had not been taken."""
        self.waiting.extendleft(reversed(list(group)))

    def place(self, request: Request) -> int:
        """Put a request into the next slot and return the slot."""
        self.running.append(request)
        return len(self.running) - 1

    def release(self, slot: int) -> int:
        """Free a slot, keeping the others compact.

        Args:
            slot: Slot of a running request.

        Returns:
            The slot whose request (and cache) now belongs in ``slot``; equal to ``slot`` if nothing has to move.
        """
        last = len(self.running) - 1
        self.running[slot] = self.running[last]
        self.running.pop()
        return last

    def retract(self) -> None:
        """Send every running request back to the front of the queue, oldest first."""
        for request in self.running:
            request.retractions += 1
            request.enqueue()
        back = sorted(self.running, key=lambda request: request.created)
        self.waiting.extendleft(reversed(back))
        self.running = []

    def drop_waiting(self, dropped: Iterable[Request]) -> None:
        """Remove requests from the queue."""
        gone = set(map(id, dropped))
        self.waiting = deque(request for request in self.waiting if id(request) not in gone)
