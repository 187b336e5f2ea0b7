"""Runs as jobs of a real Slurm with three virtual nodes: ``make test-cluster``."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.weight_manifest import SHM, SHM_PREFIX
from agentrl.launch.door import DoorError, Visit
from agentrl.rollout.journal_proof import valid_outcomes
from tests.cluster.slurm_cluster import SlurmCluster, missing
from tests.end_to_end import command, environment, metrics, overrides, processes_of, run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0 or bool(missing()), reason="Slurm's daemons need root, slurmd and munge"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"), 3)
    yield made
    made.close()


def submit(cluster: SlurmCluster, *settings: str) -> str:
    """Submits ``arithmetic_grpo`` on two nodes unless told otherwise, and returns the job's number."""
    arguments = ["recipe", "run", "arithmetic_grpo", "trainer.nodes=2", *settings, "launch.type=slurm"]
    found = subprocess.run(
        command(*arguments), env={**environment(), **cluster.env}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    match = re.match(r"job (\d+) is queued", found.stdout)
    assert match, found.stdout
    return match[1]


def output(runs: Path, name: str, job: str) -> str:
    return (runs / f"{name}.slurm-{job}.log").read_text()


def test_a_job_on_two_nodes_trains_what_two_ranks_of_one_machine_do(
    cluster: SlurmCluster, tiny_model: Path, tmp_path: Path
) -> None:
    job = submit(cluster, *overrides(tiny_model, tmp_path, "job"))
    cluster.wait(job, "COMPLETED 0", "FAILED 0")
    assert cluster.state(job) == "COMPLETED 0", output(tmp_path, "job", job)
    local = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "local", "trainer.nproc=2"))
    assert local.returncode == 0, local.stdout
    apart, together = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("job", "local"))
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-4, atol=1e-5)
    assert {record["step"] for record in metrics(tmp_path / "job")} == {0, 1, 2, 3}
    print(output(tmp_path, "job", job))


def test_servers_on_nodes_of_their_own_are_a_component_of_the_job(
    cluster: SlurmCluster, tiny_model: Path, tmp_path: Path
) -> None:
    apart = [
        "trainer.nodes=1",
        "inference.nodes=2",
        "inference.servers=2",
        "launch.slurm.server_args=[--partition=all]",
    ]
    job = submit(cluster, *overrides(tiny_model, tmp_path, "apart", *apart))
    cluster.wait(job, "COMPLETED 0", "FAILED 0")
    text = output(tmp_path, "apart", job)
    assert cluster.state(job) == "COMPLETED 0", text
    assert "node 1: server-0 is ready" in text and "node 2: server-1 is ready" in text
    assert sorted(file.name for file in (tmp_path / "apart" / "logs").glob("server-*.log")) == [
        "server-0.log",
        "server-1.log",
    ]
    local = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "beside"))
    assert local.returncode == 0, local.stdout
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("apart", "beside"))
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-5)
    assert processes_of(tmp_path) == []
    print(text)


def test_a_job_on_three_kinds_of_nodes_knows_its_secret_and_leaves_nothing_when_it_is_cancelled(
    cluster: SlurmCluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Trainer and controller, rollout workers, and servers each on a node of their own."""
    kinds = ["trainer.nodes=1", "rollout.nodes=1", "rollout.workers=2", "inference.nodes=1", "inference.servers=2"]
    before = orphans()
    job = submit(cluster, *overrides(tiny_model, tmp_path, "cancelled", "trainer.total_steps=5000", *kinds))
    run_dir = tmp_path / "cancelled"
    until_step(run_dir, 2, lambda: output(tmp_path, "cancelled", job))
    assert "node 1: rollout workers 0, 1 are ready" in output(tmp_path, "cancelled", job)
    assert_secret_is_needed(run_dir / "processes")
    cluster.control("scancel", job)
    cluster.wait(job, "CANCELLED 0")
    assert processes_of(tmp_path) == []
    assert orphans() <= before
    print(output(tmp_path, "cancelled", job))


def orphans() -> set[Path]:
    """Weights in shared memory whose process is gone; other runs of this machine have theirs."""
    owners = {file: file.name.removeprefix(SHM_PREFIX).split("-")[0] for file in SHM.glob(f"{SHM_PREFIX}*")}
    return {file for file, pid in owners.items() if not psutil.pid_exists(int(pid))}


def assert_secret_is_needed(processes: Path) -> None:
    """Calls whatever listens beyond the loopback interface, with no secret and with a wrong one."""
    workers = json.loads((processes / "controller.json").read_text())["workers_url"]
    servers = [json.loads(file.read_text())["url"] for file in sorted((processes / "servers").glob("*.json"))]
    assert len(servers) == 2
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for url, path in ((workers, "/workers/join"), *((server, "/generate") for server in servers)):
            answer = httpx.post(url + path, json={}, headers=headers, trust_env=False)
            assert answer.status_code == 401, (url, answer.text)
    head = json.loads((processes / "head.json").read_text())
    with pytest.raises(DoorError):
        Visit(head["address"], head["door"], "wrong", 2)


def test_a_job_that_is_preempted_saves_is_queued_again_and_goes_on(
    cluster: SlurmCluster, tiny_model: Path, tmp_path: Path
) -> None:
    more = ["trainer.total_steps=100", "trainer.save_every=0", "eval.every=0"]
    job = submit(cluster, *overrides(tiny_model, tmp_path, "again", *more))
    until_step(tmp_path / "again", 3, lambda: output(tmp_path, "again", job))
    cluster.control("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@120 before the time limit
    cluster.wait(job, "PENDING 1", "RUNNING 1")  # Slurm waits two minutes before it starts a job again
    cluster.wait(job, "COMPLETED 1", "FAILED 1", seconds=900)
    text = output(tmp_path, "again", job)
    assert cluster.state(job) == "COMPLETED 1", text
    assert "saved and stopped, as SIGUSR1 asked" in text
    draws = [one["draw"] for one in valid_outcomes(tmp_path / "again") if one["outcome"] == "trained"]
    assert len(draws) == len(set(draws)) == 100 * 4
    assert [record["step"] for record in metrics(tmp_path / "again")][-1] == 100
    print("\n".join(line for line in text.splitlines() if not line.startswith("step ")))


def test_a_job_that_loses_a_node_goes_on_elsewhere_from_its_newest_checkpoint(
    cluster: SlurmCluster, tiny_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "lost"
    more = ["trainer.total_steps=100", "trainer.save_every=5", "eval.every=0", "launch.restarts=1"]
    job = submit(cluster, *overrides(tiny_model, tmp_path, "lost", *more))
    until_step(run_dir, 8, lambda: output(tmp_path, "lost", job))
    node = cluster.node_of(f"{run_dir}.slurm.yaml launch.head=127.0.0.1 launch.node_rank=1")
    cluster.lose(node)
    try:
        cluster.wait(job, "COMPLETED 1", "FAILED 0", "FAILED 1", seconds=900)
        text = output(tmp_path, "lost", job)
        assert cluster.state(job) == "COMPLETED 1", text
        assert "is gone, its trainer ranks are lost" in text
        assert text.count("evaluation at step 0") == 1, "it went on from a checkpoint"
        draws = [one["draw"] for one in valid_outcomes(run_dir) if one["outcome"] == "trained"]
        assert len(draws) == len(set(draws)) == 100 * 4
        print("\n".join(line for line in text.splitlines() if not line.startswith("step ")))
    finally:
        cluster.begin(node)


def test_a_partition_that_does_not_exist_is_told(cluster: SlurmCluster, tiny_model: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tmp_path, "wrong", "launch.slurm.args=[--partition=nowhere]")
    found = subprocess.run(
        command("recipe", "run", "arithmetic_grpo", *settings, "launch.type=slurm"),
        env={**environment(), **cluster.env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 2 and "invalid partition specified: nowhere" in found.stderr
    print(found.stderr)


def until_step(run_dir: Path, step: int, said: Callable[[], str]) -> None:
    """Waits until a run has recorded a step."""
    deadline = time.monotonic() + 240
    file = run_dir / "metrics.jsonl"
    while not file.is_file() or max((one["step"] for one in metrics(run_dir)), default=0) < step:
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)
