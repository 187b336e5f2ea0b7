"""Tests learning-rate schedules."""

import pytest

from agentrl.train.schedule import learning_rate_factor, progress


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
