"""The order of tasks, and resuming in the middle of it."""

import json

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.rollout import CurriculumConfig
from agentrl.core.episode import Task
from agentrl.rollout.curriculum import Curriculum
from agentrl.rollout.tasks import TaskStream, about_batches

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


@pytest.mark.parametrize(
    ("tasks", "seed", "said"),
    [
        (TASKS[:4], 1, "draw 5 was of task|draw 6 was of task"),
        ([Task(id=f"t{i}", data={"row": "other"}) for i in range(5)], 1, "has another row than in the run"),
        (TASKS, 2, "was of task"),
    ],
)
def test_other_tasks_are_refused_where_no_draw_is_owed(tasks: list[Task], seed: int, said: str) -> None:
    """Names are numbers of rows, which any dataset has: a run that ended has settled all its draws."""
    stream = TaskStream(TASKS, seed=1)
    for _ in TASKS:
        stream.settle(stream.draw()[0])
    state = json.loads(json.dumps(stream.state()))
    assert not state["owed"] and not state["held"]
    with pytest.raises(ConfigError, match=said):
        TaskStream(tasks, seed=seed).restore(state)
    TaskStream(TASKS, seed=1).restore(state)
    del state["upcoming"]  # a checkpoint of before
    TaskStream(tasks, seed=seed).restore(state)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TaskStream([], seed=0)


def test_an_epoch_is_over_when_each_of_its_draws_has_ended_and_the_stream_ends_with_the_last_one() -> None:
    stream = TaskStream(TASKS, seed=1, epochs=2)
    drawn = [stream.draw()[0] for _ in range(10)]
    assert stream.exhausted and (stream.ended_epochs, stream.done) == (0, 0.0)
    with pytest.raises(LookupError):
        stream.draw()
    for number in (9, 8, 7, 0, 1, 2, 4):
        stream.settle(number)
    assert (stream.ended_epochs, stream.done) == (0, 0.7), "draw 3 goes on"
    stream.settle(3)
    assert stream.ended_epochs == 1
    resumed = TaskStream(TASKS, seed=1, epochs=2)
    resumed.restore(stream.state())
    assert not resumed.exhausted and (resumed.ended_epochs, resumed.done) == (1, 0.8)
    assert [resumed.draw()[0] for _ in range(2)] == drawn[5:7]
    assert resumed.exhausted


def test_batches_that_do_not_fit_the_tasks_are_said() -> None:
    assert about_batches(8, 4, 3) == "" == about_batches(9, 4, None) == about_batches(6, 4, 2)
    assert about_batches(10, 4, 1) == (
        "trainer.epochs=1 makes 10 groups, no multiple of rollout.batch_size=4: the last batch has 2, or fewer where "
        "groups are filtered or fail"
    )
    assert about_batches(3, 8, 1).startswith("trainer.epochs=1 makes 3 groups"), "no task is drawn twice"
    assert (
        about_batches(3, 8, None) == "3 tasks are fewer than rollout.batch_size=8, so a batch draws some of them twice"
    )


def test_no_more_than_all_draws_are_done_where_a_resumed_run_has_fewer_epochs() -> None:
    stream = TaskStream(TASKS, seed=1, epochs=3)
    for _ in range(12):
        stream.settle(stream.draw()[0])
    shorter = TaskStream(TASKS, seed=1, epochs=1)
    shorter.restore(stream.state())
    assert shorter.exhausted and shorter.done == 1.0


def test_a_curriculum_resumes_without_the_owed_tasks_that_are_gone() -> None:
    def stream(tasks: list[Task]) -> TaskStream:
        return TaskStream(tasks, seed=1, curriculum=Curriculum(tasks, CurriculumConfig(hard_at=0.0), seed=1))

    first = stream(TASKS)
    drawn = [first.draw() for _ in range(3)]
    gone = drawn[1][1]
    second = stream([task for task in TASKS if task != gone])
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.draw() for _ in range(2)] == [drawn[0], drawn[2]]
    assert second.draw()[0] == 3


def test_a_run_is_not_resumed_with_a_curriculum_that_it_did_not_have() -> None:
    plain = TaskStream(TASKS, seed=1)
    chosen = TaskStream(TASKS, seed=1, curriculum=Curriculum(TASKS, CurriculumConfig(hard_at=0.0), seed=1))
    with pytest.raises(ConfigError, match=r"the recipe has a rollout\.curriculum and the checkpoint has none"):
        chosen.restore(plain.state())


def test_a_resume_with_other_tasks_is_refused() -> None:
    """Its draws would be of other tasks, and each of the checkpoint's no longer be trained once."""
    first = TaskStream(TASKS, seed=1)
    for _ in range(3):
        first.draw()
    state = json.loads(json.dumps(first.state(held=[1])))
    for second in (TaskStream(TASKS, seed=2), TaskStream([Task(id=f"u{i}", data={}) for i in range(5)], seed=1)):
        with pytest.raises(ConfigError, match=r"draw 0 was of task t\d and would be of .* now"):
            second.restore(state)
    again = TaskStream(TASKS, seed=1)
    assert again.restore(state) == []
    assert [again.draw()[0] for _ in range(3)] == [0, 2, 3], "the group of draw 1 is finished"
    assert again.ended_epochs == 0


def test_a_finished_group_of_a_task_that_is_gone_is_left_out() -> None:
    def stream(tasks: list[Task]) -> TaskStream:
        return TaskStream(tasks, seed=1, curriculum=Curriculum(tasks, CurriculumConfig(hard_at=0.0), seed=1))

    first = stream(TASKS)
    drawn = [first.draw() for _ in range(3)]
    second = stream([task for task in TASKS if task != drawn[1][1]])
    assert second.restore(json.loads(json.dumps(first.state(held=[1, 2])))) == [1]
    assert second.state()["owed"] == [0, 2]
