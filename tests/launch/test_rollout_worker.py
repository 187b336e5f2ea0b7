"""The process of a rollout worker: it dies in an episode, is started again, and ends with the run."""

import asyncio
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.host.process import write_json
from agentrl.inference.kinds.kind import server_kind
from agentrl.inference.router import Router
from agentrl.launch import commands
from agentrl.launch.supervisor import Supervisor
from agentrl.launch.worker_watch import WorkerWatch
from agentrl.rollout.episode_runs import EpisodeOrder
from agentrl.rollout.worker_processes import WorkerProcesses
from agentrl.train.controller_client import SECRET_ENV
from tests.end_to_end import ROOT, overrides
from tests.rollout.test_worker_http import SECRET, controlling

SECONDS = 120


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "logs")
    yield made
    made.stop()


async def until(condition) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_it_is_not_lost(workers: WorkerProcesses, order: EpisodeOrder) -> Episode:
    """Run an episode as who ordered it does."""
    while (found := await workers.run(order)).stop_reason is StopReason.WORKER_LOST:
        pass
    return found


async def test_a_worker_that_dies_in_an_episode_is_started_again_and_the_episode_too(
    tiny_model: Path, tmp_path: Path, supervisor: Supervisor
) -> None:
    env = {SECRET_ENV: SECRET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings = [f"env.id={ROOT / 'tests' / 'toy.py'}:KillsItsProcess", f"env.kwargs.folder={tmp_path}"]
    settings = overrides(tiny_model, tmp_path, "run", *settings, "env.kwargs.at=2")
    write_json(tmp_path / "config.json", load_recipe("arithmetic_grpo", settings).model_dump(mode="json"))
    server = supervisor.start("server", [sys.executable, "-m", "agentrl.bench.instant_server"], env=env)
    await until(lambda: server.log.read_text().startswith("http"))
    router = Router([server_kind("embedded").backend(server.log.read_text().strip(), 60.0)])
    orders = [
        EpisodeOrder(Task(id=f"t/{n}", data={"question": "1+1", "answer": "2"}), f"g{n}", 0, n, version=0)
        for n in range(2)
    ]
    async with controlling(router, seconds=SECONDS) as made:
        processes = tmp_path / "processes"
        processes.mkdir()
        command = partial(commands.rollout_worker, tiny_model, tmp_path)
        watch = WorkerWatch(supervisor, range(1), command, env, processes)
        watch.start()
        watch.wait_ready(SECONDS)
        write_json(processes / "controller.json", {"url": made.url})  # it waits for the file
        jobs = [asyncio.create_task(until_it_is_not_lost(made.workers, one)) for one in orders]
        said: list[str] = []
        await until(lambda: said.extend(watch.poll()) or all(job.done() for job in jobs))
        assert [job.result().failed for job in jobs] == [False, False]
        assert all(node.token_ids for node in jobs[0].result().trajectories["assistant"].nodes)
        assert len(said) == 1 and said[0].startswith("worker-0 was killed by SIGKILL; it is started again")
        (child,) = [one for one in supervisor._children if one.name == "worker-0"]
        await made.workers.close()
        await until(lambda: child.process.poll() is not None)
        assert child.process.poll() == 0, child.tail()
        stranger = supervisor.start("stranger", command(1), env={**env, SECRET_ENV: "wrong"}, replaceable=True)
        await until(lambda: stranger.process.poll() is not None)
        assert stranger.process.poll() == 1 and "401: wrong or missing secret" in stranger.tail()
    await router.close()
    assert (tmp_path / "calls").stat().st_size in (3, 4)  # the first may have ended before the second killed
