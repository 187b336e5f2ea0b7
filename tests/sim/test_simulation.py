"""Simulated runs: what they count, the choice of a split, and a long one with flat memory."""

import gc
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.sim.account import Step
from agentrl.sim.choice import Case, best, splits, tried
from agentrl.sim.device import Speed
from agentrl.sim.episodes import Shape, Turn
from agentrl.sim.figures import figures, full_speed
from agentrl.sim.shapes import Lengths, Lognormal, Recorded
from agentrl.sim.simulation import Devices, Simulation
from agentrl.sim.virtual_loop import run_virtual


def recipe_of(*settings: str) -> Recipe:
    own = ["rollout.batch_size=2", "rollout.group_size=4", "rollout.max_concurrent=8", "rollout.episode_timeout=1e6"]
    return load_recipe("arithmetic_grpo", [*own, "inference.probe_seconds=1e4", *settings], device="cpu")


def steps_of(recipe: Recipe, devices: Devices, lengths: list[int], steps: int) -> list[Step]:
    async def main() -> list[Step]:
        return await Simulation(recipe, devices, Lengths(lengths), steps).run()

    return run_virtual(main())


def test_a_simulation_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps_of(recipe_of(), Devices(1, 1), [10], 2)
    assert not list(tmp_path.iterdir())


def test_a_synchronous_step_takes_generation_and_training() -> None:
    devices = Devices(2, 1, Speed(token=0.01, sequence=0.0025, call=0.5), train_seconds=7.0, push_seconds=1.5)
    done = steps_of(recipe_of("rollout.max_staleness=0"), devices, [100], 4)
    generation = 0.5 + 100 * (0.01 + 0.0025 * 4)  # 4 of the 8 episodes on each server
    assert [later.end - one.end for one, later in pairwise(done)] == pytest.approx(
        [generation + 7.0 + 1.5] * 3, abs=1e-3
    )
    assert {age for step in done for age in step.ages} == {0}
    assert done[-1].thrown == 0 and done[-1].generated == pytest.approx(4 * 8 * 100, abs=1.0)


def test_a_simulation_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps_of(recipe_of(), Devices(1, 1, train_seconds=1.0), [50], 3)
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_step_takes_the_longer_of_the_two_and_is_one_version_old() -> None:
    devices = Devices(2, 1, Speed(token=0.01, sequence=0.0025), train_seconds=7.0)
    done = steps_of(recipe_of("rollout.max_staleness=1", "rollout.max_concurrent=16"), devices, [100], 8)
    assert done[-1].end - done[-2].end == pytest.approx(7.0, abs=1e-3)
    assert set(done[-1].ages) == {1}
    found = figures(done, devices, 1, 16)
    assert found.step_seconds == pytest.approx(7.0, abs=1e-3) and found.trainer_busy == pytest.approx(1.0)
    assert (found.age_mean, found.age_max, found.thrown) == (1.0, 1, 0.0)


def test_tokens_of_answers_that_were_cancelled_are_thrown_away() -> None:
    """Some answers take much longer than the bound allows; nothing else is thrown away here."""
    devices = Devices(1, 1, Speed(token=0.01, sequence=0.0), train_seconds=3.0)
    settings = ("rollout.max_staleness=1", "rollout.group_size=2", "rollout.min_group=1", "rollout.max_concurrent=64")
    done = steps_of(recipe_of(*settings), devices, [100, 100, 100, 5000], 20)
    assert done[-1].thrown > 0
    assert sum(step.tokens for step in done) + done[-1].thrown <= done[-1].generated + 1.0


def test_filtered_groups_are_tokens_thrown_away() -> None:
    settings = ("rollout.skip_uniform_groups=true", "rollout.group_size=2", "rollout.max_staleness=0")
    done = steps_of(recipe_of(*settings), Devices(1, 1, train_seconds=1.0), [50], 20)
    assert done[-1].thrown > 0
    trained = sum(step.tokens for step in done)
    assert trained == 20 * 2 * 2 * 50
    assert trained + done[-1].thrown <= done[-1].generated + 1.0


def test_a_push_in_the_middle_of_answers_makes_them_as_old_as_their_first_token() -> None:
    devices = Devices(1, 1, Speed(token=1.0, sequence=0.0), train_seconds=30.0)
    done = steps_of(recipe_of("rollout.max_staleness=2", "rollout.max_concurrent=40"), devices, [20, 200], 8)
    assert max(done[-1].ages) >= 2 and min(done[-1].ages) >= 0


def test_full_load_is_what_the_slots_and_the_episodes_in_flight_allow() -> None:
    speed = Speed(0.006, 0.00006)
    assert full_speed(Devices(4, 1, speed), 256) == pytest.approx(4 * 64 / (0.006 + 64 * 0.00006))
    assert full_speed(Devices(4, 1, speed, slots=16), 256) == pytest.approx(4 * 16 / (0.006 + 16 * 0.00006))


@pytest.mark.parametrize("sequence", [0.0, 0.0005])
def test_at_full_load_a_request_that_waits_for_its_first_token_samples_nothing(sequence: float) -> None:
    speed, requests, answer = Speed(0.006, sequence, call=1.5), 64, 100
    found = full_speed(Devices(2, 1, speed), 2 * requests, answer)
    sampling = found / 2 * speed.token / (1 - found / 2 * speed.sequence)  # the inverse of Speed.tokens_per_second
    seconds = answer * (speed.token + speed.sequence * sampling)
    assert sampling / requests == pytest.approx(seconds / (speed.call + seconds))


def test_the_best_split_is_found_among_all_and_the_smaller_bound_is_taken_of_equals() -> None:
    devices = Devices(1, 1, Speed(token=0.01, sequence=0.0025), train_seconds=8.0)
    case = Case(recipe_of("rollout.max_concurrent=16"), devices, Lengths([100]), 3)
    assert splits(case, 4) == [(3, 1), (2, 2), (1, 3)]
    found = list(tried(case, 4, (0, 1, 2)))
    assert len({(one.inference, one.max_staleness) for one in found}) == len(found) >= 7
    chosen = best(found)
    # Training takes 8, 4 and 2.67 s on 1, 2 and 3 devices. One server has 8 episodes in flight with a bound of 1, which
    # take 3 s, and 16 with a bound of 2, which take 5 s for two batches.
    assert (chosen.inference, chosen.training, chosen.max_staleness) == (1, 3, 2)
    assert chosen.step_seconds == pytest.approx(8 / 3, rel=0.02)


def test_members_of_a_recorded_group_stay_together_and_shapes_repeat() -> None:
    groups = [[Shape((Turn(length + member),), float(member)) for member in range(3)] for length in (10, 1000)]
    source = Recorded(groups)
    for task in ("sim/0", "sim/1", "sim/2"):
        lengths = {source.of(task, seed).tokens for seed in range(30)}
        assert lengths in ({10, 11, 12}, {1000, 1001, 1002})
    assert Lognormal(100, 0.8, 500).of("a", 7) == Lognormal(100, 0.8, 500).of("b", 7)
    assert max(Lognormal(100, 1.5, 500).of("", seed).tokens for seed in range(500)) == 500


def test_memory_stays_flat_over_a_thousand_steps() -> None:
    """One record of 100 bytes kept for each step would be seen."""
    recipe = recipe_of("rollout.max_staleness=1", "rollout.group_size=2", "rollout.max_concurrent=8")
    sizes: dict[int, int] = {}
    steps = 0

    def after(step: Step) -> None:
        nonlocal steps
        steps += 1
        if steps in (400, 1000):
            gc.collect()
            sizes[steps] = tracemalloc.get_traced_memory()[0]

    async def main() -> None:
        devices, shapes = Devices(2, 1, Speed(0.01, 0.001), train_seconds=3.0), Lognormal(100, 0.8, 400)
        await Simulation(recipe, devices, shapes, 1000, after_step=after).run()

    tracemalloc.start()
    try:
        run_virtual(main())
    finally:
        tracemalloc.stop()
    assert steps == 1000
    assert sizes[1000] - sizes[400] < 600 * 60, sizes
