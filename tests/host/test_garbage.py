"""How often cycles are looked for."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from agentrl.host.garbage import NEW_OBJECTS, OF_AN_EPISODE, collect_rarely


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize("episodes", [0, 200])
def test_cycles_are_still_freed_without_a_call(episodes: int) -> None:
    collect_rarely(episodes)
    most = max(NEW_OBJECTS, OF_AN_EPISODE * episodes)
    found = weakref.WeakSet(Cycle() for _ in range(3 * most))
    assert len(found) <= 2 * most


def test_what_running_episodes_hold_is_not_looked_through() -> None:
    rounds: list[str] = []
    collect_rarely(1000)
    gc.callbacks.append(lambda phase, info: rounds.append(phase) if phase == "start" else None)
    try:
        kept = [[index] for index in range(1000 * OF_AN_EPISODE * 9 // 10)]
    finally:
        gc.callbacks.pop()
    assert kept and not rounds


def test_new_objects_that_stay_are_not_looked_through_each_time() -> None:
    rounds: list[str] = []
    collect_rarely()
    gc.callbacks.append(lambda phase, info: rounds.append(phase) if phase == "start" else None)
    try:
        kept = [[index] for index in range(10 * NEW_OBJECTS)]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 10 * NEW_OBJECTS and len(rounds) <= 12
