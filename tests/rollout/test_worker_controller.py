"""The controller with worker processes in place of its own: batches, journal, kills and the end of the run."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings

from agentrl.core.columns import COLUMNS, Columns
from agentrl.core.episode import StopReason
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.random_streams import stream_seed
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.episode_runs import InProcess
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.rollout.run_status import TrainerCalls, run_status
from agentrl.rollout.worker_processes import AWAY_SECONDS, WorkerProcesses
from tests.rollout.age_world import World
from tests.rollout.test_age_of_trained_episodes import OPTIONS, SCHEDULES, Schedule, overrides, run_world
from tests.rollout.test_controller import Harness
from tests.rollout.test_stale_groups import SMALL
from tests.rollout.test_worker_processes import a_run
from tests.rollout.worker_fakes import Clock, Worker


def with_episodes(worker: Worker, harness: Harness, model: Path) -> Worker:
    """Has a worker run the harness's workflow on the harness's server, with a client of its own."""
    session = SessionSettings(SamplingParams(max_new_tokens=8), 500, locked=True, model="m")
    client = ChatClient(Router([harness.backend]), ChatTemplate.from_folder(model), session, session)
    worker.loop._runs = InProcess(harness.workflow, client, harness.recipe.rollout)
    return worker


async def batches(folder: Path, model: Path, *, kill: bool = False, in_process: bool = False) -> list[bytes]:
    """Two steps of a run, with a worker killed while its episodes wait for the server; returns their batches."""
    async with a_run("a", "b") as (run, workers):
        runs = None if in_process else run.workers
        harness = Harness(folder, model, "rollout.max_staleness=0", runs=runs)
        for worker in workers:
            with_episodes(worker, harness, model)
        held = asyncio.Event()
        harness.backend.held = held if kill else None
        harness.controller.start()
        if kill:
            while len(harness.backend.requests) < 6:  # two groups of three, in both workers
                await asyncio.sleep(0.01)
            assert run.workers.in_flight == {"a": 3, "b": 3}
            waits = run_status(harness.controller, [], TrainerCalls())["waits"]
            assert [(one["process"], one["doing"]) for one in waits[2:]] == [
                ("a", "runs 3 episodes"), ("b", "runs 3 episodes")
            ]  # fmt: skip
            workers[0].kill()
            run.after(AWAY_SECONDS + 2)
            held.set()
        found = []
        for step in range(2):
            found.append(await harness.controller.next_batch(step))
            await harness.publish(step + 1, final=step == 1)
        await harness.controller.close()
    harness.journal.close()
    return found


async def test_a_batch_is_the_same_wherever_its_episodes_ran(tiny_model: Path, tmp_path: Path) -> None:
    """Seeds follow from draw and index, so also a killed worker changes nothing but the time that it took."""
    found = {}
    for name, options in {"here": {"in_process": True}, "workers": {}, "killed": {"kill": True}}.items():
        (tmp_path / name).mkdir()
        found[name] = await batches(tmp_path / name, tiny_model, **options)
        outcomes = [one for one in valid_outcomes(tmp_path / name) if one["outcome"] == "trained"]
        assert [one["draw"] for one in outcomes] == [0, 1, 2, 3], "each draw is trained once"
        failed = [one for one in read_episodes(tmp_path / name / "episodes.jsonl") if one.failed]
        assert all(one.retried and one.stop_reason is StopReason.WORKER_LOST for one in failed)
        assert len(failed) == (3 if name == "killed" else 0)
    for other in ("workers", "killed"):
        for here, there in zip(found["here"], found[other], strict=True):
            (mine, facts), (its, other_facts) = Columns.from_bytes(here), Columns.from_bytes(there)
            for column in COLUMNS:
                np.testing.assert_array_equal(getattr(mine, column), getattr(its, column))
            varies = {"seconds"}
            records = [[one.model_dump(exclude=varies) for one in columns.episodes] for columns in (mine, its)]
            assert records[0] == records[1] and facts == other_facts


class InWorkers(World):
    """The world of the ages, whose episodes run in workers."""

    def __init__(self, folder: Path, *settings: str, **more: Any) -> None:
        self.processes = WorkerProcesses(64, 1.0, 60.0, list, clock=Clock())
        self.workers: list[Worker] = []
        super().__init__(folder, *settings, runs=self.processes, **more)

    async def settle(self) -> None:
        """Let all calls between the controller and the workers happen."""
        for name in ("a", "b") if not self.workers else ():
            self.workers.append(Worker(self.processes, name))
            self.workers[-1].loop._runs = InProcess(self, self, self.recipe.rollout)
        for _ in range(5):
            await super().settle()

    async def close(self) -> None:
        """End the run and its workers."""
        self.over = True
        await super().close()
        for worker in self.workers:
            await worker.end()


async def test_what_grows_too_old_is_cancelled_in_its_worker_and_leaves_what_it_sampled(tmp_path: Path) -> None:
    """One member of the group has an answer of version 0 and samples on, the other asked for its first one then."""
    world = InWorkers(tmp_path, *SMALL, eventful=False)
    seeds = {(draw, index): stream_seed(world.recipe.seed, draw, index) for draw in (0, 1) for index in (0, 1)}
    answered = seeds[0, 0]
    world.turns = lambda task, seed: 2 if seed == answered else 1
    world.gates = {seed: asyncio.Event() for seed in seeds.values() if seed != answered}
    world.controller.start()
    await world.settle()
    world.pending[0].set_result(None)
    world.slow = {answered}
    await world.settle()
    for gate in world.gates.values():
        gate.set()
    await world.step_on()
    await world.act("newest", 1)
    assert not world.aborted, "they can still make step 1"
    await world.act("batch", 0)  # that is step 1: the earliest that they can make now is step 2
    assert world.aborted == 2 and sum(world.processes.in_flight.values()) == 2, "the next group runs"
    found = {one["index"]: one for one in world.stale_episodes() if one["group_id"] == "g0"}
    nodes = [found[index]["trajectories"]["assistant"]["nodes"] for index in (0, 1)]
    assert [sum(node["versions"] == [0] for node in own) for own in nodes] == [1, 0]
    assert all(one["reward"] is None and "rollout.max_staleness" in one["error"] for one in found.values())
    assert [one["draw"] for one in world.outcomes() if one["outcome"] == "stale"] == [0]
    await world.drain()
    assert sorted(one["draw"] for one in world.outcomes()) == list(range(8))
    await world.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULES, OPTIONS)
def test_no_trained_episode_of_a_worker_is_older_than_the_bound_and_nothing_is_lost(
    schedule: Schedule, options: tuple[int, int, int, bool]
) -> None:
    world = run_world(schedule, *overrides(*options), kind=InWorkers, tasks=10)
    assert all(age <= options[0] for age in world.ages())
    assert world.aborted == len(world.stale), "whatever is cancelled was sampling, and leaves a record"
