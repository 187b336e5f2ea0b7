"""The bound of each trained episode's age, with the real controller under any schedule."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config.rollout import StalePolicy
from tests.rollout.age_world import World

Schedule = list[tuple[str, int]]
EVENTS = ["newest", "newest", "batch", "publish", "answer"]


def long_schedule(seed: int) -> Schedule:
    """Hypothesis prefers short lists, and an old episode needs many events."""
    drawn = random.Random(seed)
    return [(drawn.choice(EVENTS), drawn.randrange(6)) for _ in range(60)]


SCHEDULES = st.integers(0, 10**6).map(long_schedule) | st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60
)


async def play(world: World, schedule: Schedule) -> None:
    world.controller.start()
    await world.settle()
    for event, number in schedule:
        await world.act(event, number)
    await world.drain()
    await world.close()


def run_world(schedule: Schedule, *options: str, kind: type[World] = World, **more: Any) -> World:
    with tempfile.TemporaryDirectory() as folder:

        async def whole() -> World:
            world = kind(Path(folder), *options, **more)
            await play(world, schedule)
            return world

        world = asyncio.run(asyncio.wait_for(whole(), 60))
        world.ends, world.stale = world.outcomes(), world.stale_episodes()
        ends = [one["draw"] for one in world.ends]
        assert len(set(ends)) == len(ends), "a draw has two ends"
        if not world.error:  # else a stop rule ended the run
            assert sorted(ends) == list(range(world.tasks)), "a draw has no end"
        return world


OPTIONS = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(2, 3), st.booleans())


def overrides(bound: int, batch: int, group: int, skip: bool) -> list[str]:
    found = [f"rollout.max_staleness={bound}", f"rollout.batch_size={batch}", f"rollout.group_size={group}"]
    return [*found, f"rollout.skip_uniform_groups={str(skip).lower()}"]


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, OPTIONS)
def test_no_trained_episode_is_older_than_the_bound_and_nothing_is_lost(
    schedule: Schedule, options: tuple[int, int, int, bool]
) -> None:
    world = run_world(schedule, *overrides(*options), tasks=14)
    assert all(age <= options[0] for age in world.ages())
    assert world.aborted == len(world.stale), "whatever is cancelled was sampling, and leaves a record"


@pytest.mark.parametrize("policy", ["mask", "keep"])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, OPTIONS)
def test_the_other_policies_cancel_nothing(
    policy: StalePolicy, schedule: Schedule, options: tuple[int, int, int, bool]
) -> None:
    world = run_world(schedule, *overrides(*options), f"rollout.stale={policy}", tasks=14)
    assert not world.aborted and not world.stale
    for step, columns in world.trained.items():
        fresh = (columns.versions >= step - options[0]).any()
        assert fresh or policy == "keep", "a batch without a token to train"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, OPTIONS, st.sampled_from(["drop", "mask", "keep"]))
def test_a_bound_of_0_is_exactly_synchronous(
    schedule: Schedule, options: tuple[int, int, int, bool], policy: StalePolicy
) -> None:
    """Everything trained at a step was sampled by the version that the step starts from, and nothing is thrown away."""
    world = run_world(schedule, *overrides(0, *options[1:]), f"rollout.stale={policy}", tasks=14)
    for step, columns in world.trained.items():
        assert set(columns.versions.tolist()) == {step}
    assert not world.aborted and not world.stale
    assert all(one["outcome"] != "stale" for one in world.ends)
