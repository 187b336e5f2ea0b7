"""Tests the split of a step's time."""

import pytest

from agentrl.train.schedule import planned_steps
from agentrl.train.step_times import step_times


def test_waiting_for_a_batch_or_an_evaluation_is_no_overhead() -> None:
    metrics = {"time/wait_batch": 1.0, "time/update": 0.9, "time/wait_evaluation": 8.0}
    found = step_times(metrics, 10.0)
    assert found["time/step"] == 10.0
    assert found["time/overhead_share"] == pytest.approx(0.01)


def test_the_training_ends_with_its_steps_or_its_epochs_whichever_is_first() -> None:
    assert planned_steps(100, None, 7) == 100
    assert planned_steps(100, 3, 7) == 21
    assert planned_steps(10, 3, 7) == 10
