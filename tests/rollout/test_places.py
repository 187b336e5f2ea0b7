"""Places of running episodes: freed one by one, given to the oldest draw, never more than the limit, never lost."""

import asyncio
import random
from pathlib import Path

import pytest

from agentrl.rollout.places import Places
from tests.rollout.age_world import World


class Crowd:
    """Members of groups that hold places until they are told to end."""

    def __init__(self, limit: int) -> None:
        self.wakes = 0
        self.places = Places(limit, self._wake)
        self.ends: dict[tuple[int, int], asyncio.Event] = {}  # of those that hold a place
        self.began: list[tuple[int, int]] = []
        self.jobs: dict[tuple[int, int], asyncio.Task[None]] = {}

    def _wake(self) -> None:
        self.wakes += 1

    async def admit(self, draw: int, members: int) -> None:
        self.places.claim(draw, members)
        for index in range(members):
            await self.start(draw, index)

    async def start(self, draw: int, index: int) -> None:
        self.jobs[draw, index] = asyncio.create_task(self._hold(draw, index))
        await self.settle()

    async def _hold(self, draw: int, index: int) -> None:
        async with self.places.one(draw, index):
            self.began.append((draw, index))
            end = self.ends[draw, index] = asyncio.Event()
            try:
                await end.wait()
            finally:
                del self.ends[draw, index]

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def end(self, draw: int, index: int) -> None:
        self.ends[draw, index].set()
        await self.settle()

    async def cancel(self, draw: int, index: int) -> None:
        self.jobs[draw, index].cancel()
        await self.settle()


async def test_a_place_is_free_when_one_member_has_ended() -> None:
    crowd = Crowd(4)
    await crowd.admit(0, 4)
    assert crowd.places.free == 0
    await crowd.end(0, 2)
    assert crowd.places.free == 1 and crowd.wakes == 1
    await crowd.admit(1, 4)
    assert crowd.places.free == -3 and crowd.began[4:] == [(1, 0)]
    await crowd.end(0, 0)
    assert crowd.began[5:] == [(1, 1)] and len(crowd.ends) == 4
    await crowd.end(0, 1)
    await crowd.end(0, 3)
    crowd.places.forget(0)
    assert crowd.places.free == 0 and crowd.began[5:] == [(1, 1), (1, 2), (1, 3)]


async def test_the_oldest_draw_is_next_also_with_another_attempt() -> None:
    crowd = Crowd(2)
    await crowd.admit(5, 2)
    await crowd.end(5, 0)  # it is tried again later
    await crowd.admit(6, 2)
    await crowd.start(5, 0)
    assert crowd.began == [(5, 0), (5, 1), (6, 0)] and crowd.places.free == -2
    await crowd.end(6, 0)
    assert crowd.began[3:] == [(5, 0)]
    await crowd.end(5, 0)
    assert crowd.began[4:] == [(6, 1)]


async def test_who_gives_up_waiting_takes_no_place_and_gives_up_its_claim() -> None:
    crowd = Crowd(1)
    await crowd.admit(0, 3)
    await crowd.cancel(0, 1)
    assert crowd.places.free == -1
    await crowd.end(0, 0)
    assert crowd.began == [(0, 0), (0, 2)]
    crowd.places.claim(1, 1)
    await crowd.start(1, 0)
    crowd.ends[0, 2].set()
    while crowd.jobs[0, 2] in asyncio.all_tasks():
        await asyncio.sleep(0)
    await crowd.cancel(1, 0)  # in the moment in which it was given the place
    crowd.places.forget(0)
    crowd.places.forget(1)
    assert crowd.places.free == 1 and not crowd.ends
    await crowd.admit(2, 1)
    assert crowd.began[-1] == (2, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_or_idle_whatever_happens(seed: int) -> None:
    chance, limit = random.Random(seed), 1 + seed % 5
    crowd, draws = Crowd(limit), 0
    for _ in range(120):
        kind = chance.choice(["admit", "end", "end", "cancel", "again"])
        over = [key for key, job in crowd.jobs.items() if job.done()]
        if kind == "admit" and crowd.places.free > 0:
            await crowd.admit(draws, chance.randrange(1, 5))
            draws += 1
        elif kind == "end" and crowd.ends:
            await crowd.end(*chance.choice(list(crowd.ends)))
        elif kind == "cancel" and crowd.jobs:
            await crowd.cancel(*chance.choice(list(crowd.jobs)))
        elif kind == "again" and over:
            await crowd.start(*chance.choice(over))
        alive = sum(not job.done() for job in crowd.jobs.values())
        assert len(crowd.ends) == min(limit, alive) and crowd.places.free == limit - alive
    for job in crowd.jobs.values():
        job.cancel()
    await asyncio.gather(*crowd.jobs.values(), return_exceptions=True)
    assert crowd.places.free == limit


LIMITED = ("rollout.batch_size=2", "rollout.group_size=2", "rollout.max_staleness=2")


async def test_a_slow_member_does_not_hold_the_places_of_its_group(tmp_path: Path) -> None:
    world = World(tmp_path, *LIMITED, "rollout.max_concurrent=4", eventful=False)
    world.controller.start()
    await world.settle()
    assert len(world.pending) == 4 and world.controller.gate.running == 2
    for answer in world.pending[::2]:  # one member of each group
        answer.set_result(None)
    await world.settle()
    assert len(world.pending) == 4 and world.controller.gate.running == 3, "two members of the next group"
    await world.close()


async def test_a_group_larger_than_the_limit_runs_part_by_part(tmp_path: Path) -> None:
    world = World(tmp_path, *LIMITED, "rollout.max_concurrent=1", tasks=2, eventful=False)
    world.controller.start()
    await world.settle()
    for _ in range(4):
        assert len(world.pending) == 1
        world.pending[0].set_result(None)
        await world.settle()
    assert not world.pending and len(world.controller._buffer) == 2
    await world.close()


async def test_a_member_that_waits_for_a_place_is_no_reason_to_cancel_its_group(tmp_path: Path) -> None:
    """Its first member is old, and the others, which have not begun, can still make a group."""
    world = World(
        tmp_path, "rollout.batch_size=1", "rollout.group_size=3", "rollout.max_staleness=1", "rollout.max_concurrent=1",
        tasks=1, eventful=False,
    )  # fmt: skip
    world.controller.start()
    await world.settle()
    bound, flight = world.controller._bound, world.controller._flight
    flight.sweep()  # as before a push: what was asked for until now has the old version
    bound.advance(2)  # the answer was asked for at version 0
    flight.sweep()
    await world.settle()
    assert world.aborted == 1 and len(world.pending) == 1
    await world.close()
