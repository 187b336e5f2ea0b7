"""The controller with worker processes in place of its own: batches, journal, kills and the end of the run."""

import asyncio
from pathlib import Path

import numpy as np

from agentrl.core.columns import COLUMNS, Columns
from agentrl.core.episode import StopReason
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.episode_runs import InProcess
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.rollout.worker_processes import AWAY_SECONDS
from tests.rollout.test_controller import Harness
from tests.rollout.test_worker_processes import a_run
from tests.rollout.worker_fakes import Worker


def with_episodes(worker: Worker, harness: Harness, model: Path) -> Worker:
    """Has a worker run the harness's workflow on the harness's server, with a client of its own."""
    session = SessionSettings(SamplingParams(max_new_tokens=8), 500, locked=True, model="m")
    client = ChatClient(Router([harness.backend]), ChatTemplate.from_folder(model), session, session)
    worker.loop._runs = InProcess(harness.workflow, client, harness.recipe.rollout)
    return worker


async def batches(folder: Path, model: Path, *, kill: bool = False, in_process: bool = False) -> list[bytes]:
    """Two steps of a run, with a worker killed while its episodes wait for the server; returns their batches."""
    harness = Harness(folder, model, "rollout.max_staleness=0")
    async with a_run("a", "b") as (run, workers):
        for worker in workers:
            with_episodes(worker, harness, model)
        if not in_process:
            harness.controller.rollouts.episodes = run.workers
        held = asyncio.Event()
        harness.backend.held = held if kill else None
        harness.controller.start()
        if kill:
            while len(harness.backend.requests) < 6:  # two groups of three, in both workers
                await asyncio.sleep(0.01)
            assert run.workers.in_flight == {"a": 3, "b": 3}
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
