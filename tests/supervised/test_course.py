from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config.load import load_recipe
from agentrl.supervised.course import Course
from agentrl.supervised.records import held_out_record

ARGS: Any = SimpleNamespace(device=torch.device("cpu"))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def course(clock: Clock, *settings: str, elapsed: float = 0.0, total: int = 100) -> Course:
    made = Course(
        load_recipe("gsm8k_sft", ["trainer.time_budget=null", *settings], device="cpu"), total, 10, elapsed, clock
    )
    made.on_train_begin(ARGS, state(0), control())
    return made


def state(step: int) -> Any:
    return SimpleNamespace(global_step=step)


def control() -> Any:
    return SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)


def step(made: Course, clock: Clock, number: int, seconds: float = 1.0) -> Any:
    clock.now += seconds
    made.on_optimizer_step(ARGS, state(number - 1), control())
    decided = control()
    made.on_step_end(ARGS, state(number), decided)
    if decided.should_save:
        made.on_save(ARGS, state(number), control())
    return decided


def test_the_learning_rate_warms_up_and_follows_the_schedule():
    made = course(Clock(), "trainer.warmup_steps=3", "trainer.min_learning_rate_ratio=0.1")
    assert [made.factor(n) for n in (0, 1, 2)] == pytest.approx([0.25, 0.5, 0.75])
    assert made.factor(50) == pytest.approx(0.1 + 0.9 * 50 / 97), "the decay starts when the warm-up ends"


def test_the_time_budget_paces_the_schedule_and_ends_the_training():
    clock = Clock()
    made = course(clock, "trainer.time_budget=10.0", "trainer.warmup_steps=0", elapsed=4.0)
    assert not step(made, clock, 1, 2.0).should_training_stop
    assert made.spent_budget is None
    assert made.elapsed == pytest.approx(6.0), "what an earlier part of the run took counts"
    assert made.factor(1) == pytest.approx(0.1 + 0.9 * 0.4)
    last = step(made, clock, 2, 2.0)
    assert last.should_training_stop and last.should_save, "another step would not fit"
    assert made.spent_budget == 10.0, "a resume must not make another step of it"


def test_checkpoints_come_by_step_by_time_and_at_the_end():
    clock = Clock()
    made = course(clock, "trainer.save_every=3", "trainer.save_seconds=5.0", total=9)
    saved = [n for n in range(1, 10) if step(made, clock, n, 4.0 if n == 5 else 1.0).should_save]
    assert saved == [3, 5, 6, 9]
    made = course(clock, "trainer.save_seconds=null", "trainer.save_epochs=1", total=25)
    assert [n for n in range(1, 26) if step(made, clock, n).should_save] == [10, 20, 25]


def test_evaluations_come_every_so_many_steps_and_not_twice_at_the_end():
    clock = Clock()
    made = course(clock, "eval.every=2", total=4)
    assert [step(made, clock, n).should_evaluate for n in range(1, 5)] == [False, True, False, False]


def test_the_share_of_pairs_has_its_interval():
    logs = {"eval_loss": 0.5, "eval_rewards/accuracies": 0.75, "eval_rewards/margins": 0.2, "eval_runtime": 3.0}
    record = held_out_record(logs, 16)
    assert record["eval/pair_accuracy"] == 0.75
    assert record["eval/pair_accuracy_low"] == pytest.approx(0.500, abs=1e-3), "Blaker, 12 of 16"
    assert record["eval/pair_accuracy_high"] == pytest.approx(0.910, abs=1e-3)
    assert set(record) == {f"eval/{name}" for name in ("loss", "margin", "examples")} | {
        f"eval/pair_accuracy{end}" for end in ("", "_low", "_high")
    }
