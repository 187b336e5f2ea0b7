"""Tests learning-rate schedules."""

import math

import pytest

from agentrl.train.schedule import Schedule, learning_rate_factor, progress


def test_progress_is_the_further_of_steps_and_time() -> None:
    assert progress(5, 100, 30, 60) == 0.5
    assert progress(90, 100, 30, 60) == 0.9
    assert progress(5, 100, 30, None) == 0.05
    assert progress(5, 100, 90, 60) == 1.0


def test_warm_up_rises_and_never_starts_at_zero() -> None:
    factors = [learning_rate_factor(s, 0, warmup_steps=3, schedule="constant", floor=0.1) for s in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_decay_ends_at_the_floor(schedule: str, middle: float) -> None:
    def factor(done: float) -> float:
        return learning_rate_factor(10, done, warmup_steps=0, schedule=schedule, floor=0.1)  # type: ignore[arg-type]

    assert factor(0.0) == 1.0
    assert factor(0.5) == pytest.approx(middle)
    assert factor(1.0) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("budget", [None, 50.0])
def test_the_decay_starts_at_the_peak_when_the_warm_up_ends(schedule: Schedule, budget: float | None) -> None:
    """Twenty steps, five of warm-up; with a budget of 50 s and 2.5 s a step, steps and time agree."""
    steps, warmup, floor = 20, 5, 0.1

    def factor(step: int) -> float:
        done = progress(step, steps if budget is None else 1000, 2.5 * step, budget)
        return learning_rate_factor(step, done, warmup_steps=warmup, schedule=schedule, floor=floor)

    factors = [factor(step) for step in range(steps + 1)]
    assert factors[warmup] == 1.0, "the peak"
    for step in range(warmup, steps + 1):
        part = (step - warmup) / (steps - warmup)
        shape = 1 - part if schedule == "linear" else (1 + math.cos(math.pi * part)) / 2
        assert factors[step] == pytest.approx(floor + (1 - floor) * shape, abs=1e-12)


def test_the_decay_never_rises_when_steps_take_unequally_long() -> None:
    elapsed, factors = 0.0, []
    for step in range(12):
        done = progress(step, 100, elapsed, 60)
        factors.append(learning_rate_factor(step, done, warmup_steps=3, schedule="linear", floor=0))
        elapsed += [1, 9, 2, 8, 0.5, 12, 1, 1, 7, 3, 6, 4][step]
    after = factors[3:]
    assert after[0] == 1.0 and after == sorted(after, reverse=True)
