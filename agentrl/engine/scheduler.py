"""Assigns requests to slots; it needs no model, clock or thread.

Guarantees: running requests fill slots 0..B-1 without gaps, and together never need more tokens than ``max_tokens``; a
request is in exactly one of waiting, running, finished; requests are admitted in order of arrival, except that requests
with the same prefix and images as the first are admitted with it (one prefill serves all); a retracted request is
queued before all newer ones.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from agentrl.engine.request import Request


class Scheduler:
    """Assigns queued requests to slots.

    Args:
        max_running: Number of slots.
        max_tokens: Most tokens of all running requests together, each counted with its full possible length; ``None``
            for no limit. A request that needs more by itself would never run, so the caller must refuse it.
    """

    def __init__(self, max_running: int, max_tokens: int | None = None) -> None:
        """Start without requests."""
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
        """Take the first request of the queue and those with the same prefix, as many as fit; empty if none fits.

        Requests for prompt logprobs are included: the caller computes them in the prefill if any of the group needs
        them.

        Args:
            taken: Requests that were taken before and are not placed yet.
            plain_only: Return an empty group, and leave the queue unchanged, if any of the group needs prompt logprobs.
        """
        slots = self.max_running - len(self.running) - len(taken)
        if slots <= 0 or not self.waiting:
            return []
        head = self.waiting[0]
        alike = (r for r in self.waiting if r.prefix_hash == head.prefix_hash and r.prefix == head.prefix)
        group = [r for r in alike if r.images == head.images][:slots]
        group = group[: self._that_fit(group, taken)]
        if plain_only and any(r.needs_prompt_logprobs for r in group):
            return []
        gone = set(map(id, group))
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        return group

    def _that_fit(self, group: Sequence[Request], taken: Sequence[Request]) -> int:
        """Number of a group's requests that fit the token limit."""
        if self.max_tokens is None:
            return len(group)
        used = sum(request.footprint for request in (*self.running, *taken))
        return bisect.bisect_right(list(itertools.accumulate(r.footprint for r in group)), self.max_tokens - used)

    def put_back(self, group: Iterable[Request]) -> None:
        """Return taken requests to the front of the queue."""
        self.waiting.extendleft(reversed(list(group)))

    def place(self, request: Request) -> int:
        """Put a request into the next slot and return the slot."""
        self.running.append(request)
        return len(self.running) - 1

    def release(self, slot: int) -> int:
        """Free a slot; the last running request takes its place, so that no gap remains.

        Args:
            slot: Slot of a running request.

        Returns:
            The former slot of the request that is now in ``slot``; the caller moves its cache, unless both are equal.
        """
        last = len(self.running) - 1
        self.running[slot] = self.running[last]
        self.running.pop()
        return last

    def retract(self) -> None:
        """Move all running requests back to the front of the queue, oldest first."""
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
