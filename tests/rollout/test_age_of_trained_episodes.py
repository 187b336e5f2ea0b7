"""The bound of each trained episode's age, with the real controller under any schedule."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.rollout import StalePolicy
from agentrl.rollout.errors import RolloutError
from tests.rollout.age_world import World

SCHEDULES = st.lists(
    st.tuples(st.sampled_from(["newest", "newest", "batch", "publish", "answer"]), st.integers(0, 5)),
    min_size=10,
    max_size=80,
)


def check_accounts(world: World) -> None:
    """No capacity leaks: what the gate counts is what runs, waits and was trained."""
    controller = world.controller
    running = sum(task.get_name().startswith("group-") for task in controller._groups)
    trained = sum(len({one.group_id for one in columns.episodes}) for columns in world.trained.values())
    assert controller.gate.running == running
    assert controller.gate.accepted == trained + len(controller._buffer)
    assert set(controller._flight._groups) <= {int(t.get_name().split("-")[1]) for t in controller._groups}


async def play(world: World, schedule: list[tuple[str, int]]) -> None:
    world.controller.start()
    await world.settle()
    for event, number in schedule:
        await world.act(event, number)
        check_accounts(world)
    await world.drain()
    check_accounts(world)
    await world.close()


def run_world(schedule: list[tuple[str, int]], *options: str, **more: Any) -> World:
    with tempfile.TemporaryDirectory() as folder:
        async def whole() -> World:
            world = World(Path(folder), *options, **more)
            await play(world, schedule)
            return world

        world = asyncio.run(asyncio.wait_for(whole(), 60))
        ends = [one["draw"] for one in world.outcomes()]
        assert sorted(ends) == list(range(world.tasks)), "each draw has exactly one end"
        return world


@settings(max_examples=60, deadline=None)
@given(
    SCHEDULES, st.integers(0, 2), st.integers(1, 3), st.integers(2, 3), st.booleans(), st.sampled_from(["drop", "mask", "keep"])
)
def test_the_bound_holds_and_nothing_is_lost_under_any_schedule(
    schedule: list[tuple[str, int]], bound: int, batch: int, group: int, skip: bool, policy: StalePolicy
) -> None:
    options = [f"rollout.max_staleness={bound}", f"rollout.batch_size={batch}", f"rollout.group_size={group}"]
    options += [f"rollout.stale={policy}", f"rollout.skip_uniform_groups={str(skip).lower()}"]
    world = run_world(schedule, *options, tasks=14)
    if policy == "drop":
        assert all(age <= bound for age in world.ages())
        assert all(len(columns.versions) for columns in world.trained.values())
    if policy == "mask":
        for step, columns in world.trained.items():
            assert (columns.versions >= step - bound).any(), "a batch without a token to train"
    if policy != "drop":
        assert not world.aborted
