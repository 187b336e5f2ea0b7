"""Promises of the controller under any schedule of faults: hypothesis makes a failing schedule as short as it can.

A promise is a function of a :class:`Ran`; put it into ``PROMISES`` and every schedule is held against it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config.load import load_recipe
from agentrl.inference.backend import InferenceError
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.sim.device import Speed
from agentrl.sim.faults import KINDS, Durations, Kind, Schedule
from agentrl.sim.shapes import Lognormal
from agentrl.sim.simulation import Devices, Simulation
from agentrl.sim.virtual_loop import Deadlock, run_virtual
from agentrl.weights.transaction import WeightPushError

TASKS, BATCH, MEMBERS = 7, 2, 2
RECIPE = [
    f"rollout.batch_size={BATCH}", f"rollout.group_size={MEMBERS}", "rollout.max_concurrent=8",
    "rollout.episode_timeout=300", "rollout.close_timeout=5", "rollout.max_failure_rate=1", "weights.lease_seconds=60",
    "inference.patience=120", "inference.probe_seconds=30", "eval.every=1",
]  # fmt: skip


@dataclass
class Ran:
    """A simulated run that is over."""

    simulation: Simulation
    outcomes: list[dict[str, object]]
    staleness: int
    drops: bool  # whether episodes that are too old are dropped
    every: int  # steps from one evaluation to the next
    records: list[tuple[int, dict[str, float]]]
    stopped: str  # why the controller ended it before its end

    def all_drawn(self) -> bool:
        return not self.stopped


def batches_are_whole(ran: Ran) -> None:
    sizes = [step.groups for step in ran.simulation.steps]
    assert all(size == BATCH for size in sizes[:-1]) and all(0 < size <= BATCH for size in sizes[-1:]), sizes


def each_draw_has_one_end(ran: Ran) -> None:
    ends = Counter(one["draw"] for one in ran.outcomes)
    assert all(count == 1 for count in ends.values()), ends
    if ran.all_drawn():
        assert sorted(ends) == list(range(TASKS)), ends  # type: ignore[type-var]


def trained_groups_are_in_the_journal(ran: Ran) -> None:
    trained = Counter(one["step"] for one in ran.outcomes if one["outcome"] == "trained")
    assert [trained[step] for step in range(len(ran.simulation.steps))] == [s.groups for s in ran.simulation.steps]


def capacity_comes_back(ran: Ran) -> None:
    if ran.all_drawn():
        assert ran.simulation.controller.gate.running == 0
    assert [status.sessions for status in ran.simulation.router.status()] == [0] * len(ran.simulation.servers)


def no_token_is_counted_twice(ran: Ran) -> None:
    steps = ran.simulation.steps
    if steps:
        trained = sum(step.tokens for step in steps)
        assert trained + steps[-1].thrown <= steps[-1].generated + 1.0


def ages_keep_the_bound(ran: Ran) -> None:
    """The gate bounds the mean; ``rollout.stale=drop``, the default, bounds each episode."""
    if ages := [age for step in ran.simulation.steps for age in step.ages]:
        assert (max if ran.drops else fmean)(ages) <= ran.staleness, ages


def each_due_version_is_evaluated_once(ran: Ran) -> None:
    evaluated = Counter(step for step, metrics in ran.records if "eval/judged" in metrics)
    assert all(count == 1 for count in evaluated.values()), evaluated
    if ran.all_drawn():
        last = len(ran.simulation.steps)
        assert sorted(evaluated) == sorted({*range(0, last + 1, ran.every), last}), evaluated
        assert {step for step, _ in ran.records} == set(range(last + 1))
        assert ran.simulation.controller.finished.is_set(), "the last evaluation belongs to the run"


PROMISES: list[Callable[[Ran], None]] = [
    batches_are_whole,
    each_draw_has_one_end,
    trained_groups_are_in_the_journal,
    capacity_comes_back,
    no_token_is_counted_twice,
    ages_keep_the_bound,
    each_due_version_is_evaluated_once,
]


def play(decisions: Sequence[Kind], staleness: int = 1, *more: str, evaluated: int = 2) -> Ran:
    """Run one epoch with these faults; a wait that never ends raises ``Deadlock``."""
    recipe = load_recipe("arithmetic_grpo", [*RECIPE, f"rollout.max_staleness={staleness}", *more], device="cpu")
    devices = Devices(2, 1, Speed(0.05, 0.001), train_seconds=10.0, push_seconds=0.5)
    stopped, records = "", list[tuple[int, dict[str, float]]]()
    with TemporaryDirectory() as folder:

        async def main() -> Simulation:
            nonlocal stopped
            faults = Schedule(decisions, Durations(call=100.0))
            simulation = Simulation(
                recipe, devices, Lognormal(200, 0.8, 1000), steps=100, faults=faults,
                folder=Path(folder), epochs=1, tasks=TASKS, evaluated=evaluated, write=lambda *one: records.append(one),
            )  # fmt: skip
            try:
                await simulation.run()
            except (RolloutError, WeightPushError, InferenceError) as error:  # an end with a reason keeps the promises
                stopped = str(error)
            await asyncio.sleep(10.0)  # teardowns of cancelled episodes, see rollout.close_timeout
            left = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
            assert not left, left
            return simulation

        simulation = run_virtual(main(), limit=2e3 * len(decisions) + 1e4)
        outcomes = valid_outcomes(Path(folder)) if (Path(folder) / "journal.jsonl").is_file() else []
        drops, every = recipe.rollout.stale == "drop", recipe.eval.every
        return Ran(simulation, outcomes, staleness, drops, every, records, stopped)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(KINDS), max_size=60), st.integers(0, 2), st.sampled_from(["drop", "keep"]),
    st.sampled_from([("wait", 1), ("mix", 2)]),
)  # fmt: skip
def test_every_promise_holds_under_any_schedule(
    decisions: list[Kind], staleness: int, policy: str, evaluation: tuple[str, int]
) -> None:
    on_push, every = evaluation
    choices = (f"rollout.stale={policy}", f"eval.on_push={on_push}", f"eval.every={every}")
    ran = play(decisions, staleness, *choices)
    for promise in PROMISES:
        promise(ran)


def test_without_faults_all_is_trained() -> None:
    ran = play([])
    assert [step.groups for step in ran.simulation.steps] == [2, 2, 2, 1]
    assert {one["outcome"] for one in ran.outcomes} == {"trained"}
    assert ran.simulation.steps[-1].thrown == 0


def test_the_same_schedule_gives_the_same_run() -> None:
    faults: list[Kind] = ["slow", "crash", "fine", "hang", "late", "duplicate", "crash"]
    assert play(faults).simulation.steps == play(faults).simulation.steps


@pytest.mark.parametrize("kind", KINDS[1:])
def test_each_kind_of_fault_happens_and_the_run_goes_on(kind: Kind) -> None:
    ran = play([*["fine"] * 3, kind, kind], evaluated=0)
    assert ran.all_drawn(), ran.stopped
    for promise in PROMISES:
        promise(ran)


def test_a_planted_leak_is_found_and_its_schedule_shrinks_to_one_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error: a group in which an episode failed does not give its place back."""
    from hypothesis import find

    from agentrl.rollout.staleness import StalenessGate

    def leaky(self: StalenessGate, *, accepted: bool) -> None:
        self.running -= int(accepted)
        self.accepted += int(accepted)

    monkeypatch.setattr(StalenessGate, "finish", leaky)

    def breaks(decisions: list[Kind]) -> bool:
        try:
            ran = play(decisions, evaluated=0)
        except Deadlock:
            return True
        return ran.all_drawn() and ran.simulation.controller.gate.running != 0

    shortest = find(
        st.lists(st.sampled_from(KINDS), max_size=12), breaks,
        settings=settings(max_examples=60, deadline=None, derandomize=True),
    )  # fmt: skip
    assert 1 <= len(shortest) <= 4, shortest
