"""The search for the smallest staleness bound that keeps the trainer fed, against simulated systems."""

import heapq
import random
from collections.abc import Callable

import pytest

from agentrl.rollout.auto_bound import FULL, HUNGRY, MOST, START, WINDOW, AutoBound

Lengths = Callable[[random.Random], float]


class System:
    """Generation and training in virtual time: groups run side by side, a batch takes the first that are finished.

    Args:
        length: Seconds of one group, drawn at random.
        train: Seconds of one trainer step.
        batch: Groups of a step.
        slots: Groups that are generated at the same time at full speed.
    """

    def __init__(self, length: Lengths, train: float, batch: int = 8, slots: int = 1000) -> None:
        self.length, self.train, self.batch, self.slots = length, train, batch, slots
        self.random = random.Random(0)
        self.now = 0.0
        self.running: list[float] = []  # times at which running groups end
        self.started = self.version = 0

    def step(self, bound: int) -> tuple[float, float]:
        """One trainer step with a bound; returns the seconds waited for the batch, and those of the whole step."""
        asked = self.now
        self._admit(bound)
        ended = [heapq.heappop(self.running) for _ in range(self.batch)]
        self.now = max(asked, ended[-1]) + self.train
        self.version += 1
        return max(asked, ended[-1]) - asked, self.now - asked

    def _admit(self, bound: int) -> None:
        while self.started < (bound + self.version + 1) * self.batch:
            free = self.now if len(self.running) < self.slots else sorted(self.running)[-self.slots]
            heapq.heappush(self.running, max(self.now, free) + self.length(self.random))
            self.started += 1


def settle(system: System, steps: int = 600, auto: AutoBound | None = None) -> tuple[list[int], list[float]]:
    """Runs a system; returns the bound and the share waited of each step."""
    auto = auto or AutoBound()
    bounds, shares = [], []
    for _ in range(steps):
        bounds.append(auto.bound)
        waited, seconds = system.step(auto.bound)
        shares.append(waited / seconds)
        auto.observe(waited, seconds)
        assert 0 <= auto.bound <= MOST and abs(auto.bound - bounds[-1]) <= 1
    return bounds, shares


def share_at(bound: int, make: Callable[[], System], steps: int = 200) -> float:
    """Share of its time that the trainer waits with a fixed bound."""
    system = make()
    found = [system.step(bound) for _ in range(steps)][20:]
    return sum(one for one, _ in found) / sum(one for _, one in found)


def mostly(bounds: list[int]) -> int:
    """The bound of most steps of the second half."""
    half = bounds[len(bounds) // 2 :]
    return max(set(half), key=half.count)


SYSTEMS: dict[str, Callable[[], System]] = {
    "generation takes no time": lambda: System(lambda _: 0.001, train=10.0),
    "as long as a step": lambda: System(lambda _: 9.0, train=10.0),
    "three steps": lambda: System(lambda _: 29.0, train=10.0),
    "eight steps": lambda: System(lambda _: 78.0, train=10.0),
    "long tails": lambda: System(lambda r: min(r.lognormvariate(2.0, 0.8), 60.0), train=10.0),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_smallest_bound_that_feeds_the_trainer_is_found(name: str) -> None:
    fed = next(bound for bound in range(MOST + 1) if share_at(bound, SYSTEMS[name]) <= HUNGRY)
    bounds, shares = settle(SYSTEMS[name]())
    assert mostly(bounds) == fed, bounds[::WINDOW]
    half = shares[len(shares) // 2 :]
    assert sum(half) / len(half) <= HUNGRY + 0.02, "and what is tried meanwhile costs little"


def test_a_bound_that_does_not_help_is_taken_back() -> None:
    """Generation has half the throughput of training: beyond some bound the wait is the same for all."""
    make = lambda: System(lambda _: 20.0, train=10.0, slots=8)  # noqa: E731
    assert min(share_at(bound, make) for bound in range(MOST + 1)) > 0.3
    bounds, _ = settle(make(), 1200)
    assert mostly(bounds) <= START + 1 and max(bounds) <= START + 2
    assert sum(bound != mostly(bounds) for bound in bounds[600:]) < 0.2 * 600, "tries become rare"


def test_a_smaller_bound_that_leaves_the_trainer_just_hungry_is_tried_seldom() -> None:
    """It saves less of the wait than a larger bound must, and would be taken for as good as the larger one for ever."""
    auto, bounds = AutoBound(), list[int]()
    for _ in range(1200):
        auto.observe(0.08 if auto.bound > 1 else 0.55, 10.0)
        bounds.append(auto.bound)
    assert mostly(bounds) == 2
    assert sum(bound != 2 for bound in bounds[600:]) < 0.1 * 600


def test_it_follows_a_system_that_changes() -> None:
    system, auto = System(lambda _: 9.0, train=10.0), AutoBound()
    settle(system, 200, auto)
    assert auto.bound == 1
    system.length = lambda _: 35.0  # answers grow
    bounds, _ = settle(system, 300, auto)
    assert mostly(bounds) == 4
    system.length = lambda _: 9.0
    bounds, _ = settle(system, 900, auto)
    assert mostly(bounds) == 1


def test_a_change_is_judged_only_when_it_has_come_into_effect() -> None:
    auto = AutoBound()
    said = [auto.observe(5.0, 10.0) for _ in range(START + 1 + WINDOW)]
    assert said[:-1] == [None] * (len(said) - 1)
    assert said[-1] == "the trainer waits for batches 50% of its time" and auto.bound == START + 1
    for _ in range(auto.bound + 1 + WINDOW):
        auto.observe(5.0, 10.0)
    assert auto.bound == START, "it did not help"
    assert FULL < HUNGRY
