"""Which tasks are drawn as their solve rates change."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from agentrl.config.errors import ConfigError, DataError
from agentrl.config.rollout import CurriculumConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Task
from agentrl.core.workflow import LLM, Outcome
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.curriculum import Curriculum, pools_of
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.rollout.tasks import TaskStream
from tests.rollout.instant import Instant, run_virtually
from tests.rollout.test_group_run import Plays

TASKS = [Task(id=f"t{i}", data={"level": i // 4, "word": "abc"[i // 4]}) for i in range(12)]


def drawn(curriculum: Curriculum, count: int) -> list[str]:
    return [curriculum.draw().id for _ in range(count)]


def test_a_solved_task_retires_and_stays_so_when_a_late_group_fails_it() -> None:
    curriculum = Curriculum(TASKS[:3], CurriculumConfig(retire_at=0.9, retire_after=2), seed=0)
    curriculum.observe(0, "t0", 1.0)
    curriculum.observe(1, "t0", 0.5)
    curriculum.observe(2, "t0", 1.0)
    assert "t0" in drawn(curriculum, 6), "solved twice, but not in a row"
    curriculum.observe(3, "t0", 0.9)
    assert set(drawn(curriculum, 20)) == {"t1", "t2"}
    curriculum.observe(4, "t0", 0.0)  # it was drawn before the task retired
    assert set(drawn(curriculum, 20)) == {"t1", "t2"}
    assert curriculum.metrics() == {"curriculum/pool": 1.0, "curriculum/retired": 1.0, "curriculum/solve_rate": 3.4 / 5}


def test_the_stream_ends_when_every_task_has_retired() -> None:
    curriculum = Curriculum(TASKS[:2], CurriculumConfig(retire_at=1.0, retire_after=1), seed=0)
    stream = TaskStream(TASKS[:2], 0, curriculum=curriculum)
    for _ in range(2):
        assert not stream.exhausted
        number, _ = stream.draw()
        stream.observe(number, 1.0)
    assert stream.exhausted
    with pytest.raises(LookupError):
        stream.draw()


def test_a_hard_task_is_drawn_in_one_of_several_passes_and_never_forgotten() -> None:
    curriculum = Curriculum(TASKS[:4], CurriculumConfig(hard_at=0.1, hard_every=4, window=2), seed=0)
    for draw, rate in enumerate([0.0, 0.2]):
        curriculum.observe(draw, "t0", rate)
    for draw in range(4):
        curriculum.observe(draw, "t1", 0.5)
    counts = Counter(drawn(curriculum, 4 + 3 + 3 + 3 + 4 + 3 + 3 + 3))
    assert counts == {"t0": 2, "t1": 8, "t2": 8, "t3": 8}
    assert curriculum.metrics()["curriculum/hard"] == 1.0
    curriculum.observe(9, "t0", 1.0)  # the mean over the window is now above
    assert curriculum.metrics()["curriculum/hard"] == 0.0


def test_tasks_that_are_all_hard_are_drawn_all_the_same() -> None:
    curriculum = Curriculum(TASKS[:2], CurriculumConfig(hard_at=0.0), seed=0)
    for task in ("t0", "t1"):
        curriculum.observe(0, task, 0.0)
    assert sorted(drawn(curriculum, 4)) == ["t0", "t0", "t1", "t1"]


def test_the_next_pool_opens_by_the_latest_groups_of_the_hardest_open_one() -> None:
    config = CurriculumConfig(column="level", open_at=0.5, open_groups=4)
    curriculum = Curriculum(TASKS, config, seed=0)
    easy = {"t0", "t1", "t2", "t3"}
    assert set(drawn(curriculum, 12)) == easy
    for draw, rate in enumerate([1.0, 0.0, 0.25, 0.5, 1.0]):  # the first alone is no pool's solve rate
        curriculum.observe(draw, "t0", rate)
    assert set(drawn(curriculum, 12)) == easy, "the mean of all is 0.55, of the latest four 0.4375"
    curriculum.observe(5, "t1", 1.0)  # the latest four: 0.25, 0.5, 1, 1
    assert set(drawn(curriculum, 8)) == {f"t{i}" for i in range(8)}, "a pass over both pools begins at once"
    assert curriculum.metrics() == {"curriculum/pool": 2.0}
    for draw in range(4):
        curriculum.observe(draw, "t0", 1.0)  # an easier pool does not open the third
    assert curriculum.metrics() == {"curriculum/pool": 2.0}
    for draw in range(4):
        curriculum.observe(draw, "t5", 1.0)
    assert curriculum.metrics()["curriculum/pool"] == 3.0


def test_a_pool_whose_tasks_have_all_retired_opens_the_next() -> None:
    config = CurriculumConfig(column="level", retire_at=1.0, retire_after=1)
    curriculum = Curriculum(TASKS, config, seed=0)
    for draw in range(4):
        curriculum.observe(draw, f"t{draw}", 1.0)
    assert set(drawn(curriculum, 8)) == {"t4", "t5", "t6", "t7"}


def test_pools_are_in_the_given_order_and_a_column_that_does_not_fit_is_refused() -> None:
    words = CurriculumConfig(column="word", pools=("c", "a", "b"))
    assert [pool[0] for pool in pools_of(TASKS, words)] == ["t8", "t0", "t4"]
    assert [pool[0] for pool in pools_of(TASKS[::-1], CurriculumConfig(column="level"))] == ["t3", "t7", "t11"]
    with pytest.raises(DataError, match=r"column=size: task t0 has no such column, only level, word"):
        pools_of(TASKS, CurriculumConfig(column="size"))
    with pytest.raises(DataError, match=r"'a', which is not a number: set rollout\.curriculum\.pools"):
        pools_of(TASKS, CurriculumConfig(column="word"))
    with pytest.raises(DataError, match=r"does not name 'c', which task t8 has"):
        pools_of(TASKS, CurriculumConfig(column="word", pools=("a", "b")))
    with pytest.raises(DataError, match=r"has \[1\], which is neither a number nor text"):
        pools_of([Task(id="t", data={"level": [1]})], CurriculumConfig(column="level"))


def test_a_resumed_stream_draws_what_the_other_one_would_have_drawn() -> None:
    """All groups up to the checkpoint are settled, so nothing is owed."""
    config = CurriculumConfig(column="level", retire_at=1.0, hard_at=0.2, open_at=0.5, open_groups=6)

    def stream() -> TaskStream:
        return TaskStream(TASKS, 3, curriculum=Curriculum(TASKS, config, seed=3))

    def run(one: TaskStream, rates: random.Random, count: int) -> list[str]:
        found = []
        for _ in range(count):
            number, task = one.draw()
            one.observe(number, rates.choice([0.0, 0.5, 1.0, 1.0]))
            one.settle(number)
            found.append(task.id)
        return found

    rates = random.Random(7)
    whole = stream()
    run(whole, rates, 40)
    resumed = stream()
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert resumed.curriculum is not None and resumed.curriculum.metrics() == whole.curriculum.metrics()  # type: ignore[union-attr]
    assert resumed.curriculum.metrics()["curriculum/pool"] > 1
    later = random.Random(8)
    state = later.getstate()
    expected = run(whole, later, 15)
    later.setstate(state)
    assert run(resumed, later, 15) == expected


def test_an_owed_draw_is_the_same_task_and_its_solve_rate_does_not_count_twice() -> None:
    config = CurriculumConfig(retire_at=1.0, retire_after=1)
    stream = TaskStream(TASKS[:4], 0, curriculum=Curriculum(TASKS[:4], config, seed=0))
    first, second, third = stream.draw(), stream.draw(), stream.draw()
    stream.observe(first[0], 1.0)
    stream.settle(first[0])
    stream.observe(second[0], 1.0)  # ended, but no step has counted it
    stream.observe(third[0], 0.0)
    resumed = TaskStream(TASKS[:4], 0, curriculum=Curriculum(TASKS[:4], config, seed=0))
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.curriculum is not None
    assert resumed.curriculum.metrics() == {
        "curriculum/pool": 1.0,
        "curriculum/retired": 1.0,
        "curriculum/solve_rate": 1.0,
    }
    assert [resumed.draw(), resumed.draw()] == [second, third]
    plain = TaskStream(TASKS[:4], 0)
    with pytest.raises(ConfigError, match=r"the checkpoint has a rollout\.curriculum and the recipe has none"):
        plain.restore(stream.state())


def test_a_task_that_retires_in_the_middle_of_a_pass_is_not_drawn_from_its_rest() -> None:
    """Its group of the pass before ended late, and its next draw was planned already."""
    curriculum = Curriculum(TASKS[:3], CurriculumConfig(retire_at=1.0, retire_after=1), seed=0, shuffle=False)
    assert drawn(curriculum, 4) == ["t0", "t1", "t2", "t0"]
    curriculum.observe(1, "t1", 1.0)
    assert drawn(curriculum, 4) == ["t2", "t0", "t2", "t0"]


def test_the_curriculum_sees_the_outcome_of_every_group_whether_it_is_trained_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is always solved makes groups without signal: if only trained ones counted, it would never retire."""
    seen: dict[int, float] = {}
    observe, stale = Curriculum.observe, AgeBound.stale

    def noted(self: Curriculum, draw: int, task: str, solve_rate: float) -> None:
        seen[draw] = solve_rate
        observe(self, draw, task, solve_rate)

    def too_old(self: AgeBound, columns: Columns) -> list[bool]:
        old = columns.episodes and columns.episodes[0].group_id == "g2"
        return [True] * len(columns.episodes) if old else stale(self, columns)

    monkeypatch.setattr(Curriculum, "observe", noted)
    monkeypatch.setattr(AgeBound, "stale", too_old)

    async def act(llm: LLM, number: int) -> Outcome:
        draw, index = divmod(number, 3)
        if draw == 1 and index:
            raise ValueError("of the policy's own making")
        llm.session().say(3)  # type: ignore[attr-defined]
        return Outcome(reward=1.0 if draw < 2 else float(index == 0))

    settings = ["rollout.skip_uniform_groups=true", "rollout.curriculum.retire_at=1", "rollout.max_failure_rate=1"]
    run = Instant(tmp_path, Plays(act), *settings, "rollout.max_concurrent=3", "rollout.batch_size=2")

    async def work() -> None:
        run.controller.start()
        await run.step(0)
        await run.close()

    run_virtually(work())
    outcomes = {one["draw"]: one["outcome"] for one in valid_outcomes(tmp_path) if one["step"] == 0}
    assert [outcomes[draw] for draw in range(5)] == ["filtered", "failed", "stale", "trained", "trained"]
    assert [seen[draw] for draw in range(5)] == pytest.approx([1.0, 1.0, 1 / 3, 1 / 3, 1 / 3])
