"""The order of tasks, and resuming in the middle of it."""

import pytest

from agentrl.core.episode import Task
from agentrl.rollout.tasks import TaskStream

TASKS = [Task(id=f"t{i}", data={}) for i in range(5)]


def test_each_epoch_holds_each_task_once_in_a_new_order() -> None:
    stream = TaskStream(TASKS, seed=1)
    epochs = [[stream.draw()[1].id for _ in TASKS] for _ in range(4)]
    assert all(sorted(epoch) == [t.id for t in TASKS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = TaskStream(TASKS, seed=1)
    assert [again.draw()[1].id for _ in range(20)] == [t for epoch in epochs for t in epoch]


def test_after_a_restart_owed_tasks_come_first_and_then_the_rest() -> None:
    stream = TaskStream(TASKS, seed=1)
    drawn = [stream.draw() for _ in range(7)]
    for number, _ in drawn[:3]:
        stream.settle(number)
    state = stream.state()
    after = TaskStream(TASKS, seed=1)
    after.restore(state)
    assert [after.draw() for _ in range(5)] == [*drawn[3:], stream.draw()]
    assert after.state()["owed"] == [3, 4, 5, 6, 7]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TaskStream([], seed=0)
