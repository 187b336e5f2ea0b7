"""Runs on a real Ray cluster of three virtual nodes on this machine: ``make test-cluster``."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.rollout.journal_proof import valid_outcomes
from tests.end_to_end import command, environment, metrics, overrides, processes_of, run

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="Ray is an extra: make test-cluster installs it")
pytestmark = pytest.mark.cluster

MORE: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}
FAST = dict.fromkeys(("health_check_initial_delay_ms", "health_check_period_ms", "health_check_timeout_ms"), 1000) | {
    "health_check_failure_threshold": 2
}


class Nodes:
    """A cluster of a head that takes no run, and nodes that do."""

    def __init__(self, count: int) -> None:
        head = {"num_cpus": 1, "_system_config": FAST, **MORE}
        self.cluster = ray_cluster.Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(count)]
        self.cluster.wait_for_nodes()

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=4, resources={"trainer": 1}, **MORE)

    def kill(self, node: Any) -> None:
        """The node dies, with all that runs on it."""
        process = node.all_processes["raylet"][0].process
        process.kill()
        process.wait()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes(2)
    yield made
    made.cluster.shutdown()


def start(nodes: Nodes, *settings: str, each: str = "trainer: 1") -> "subprocess.Popen[str]":
    """Starts ``arithmetic_grpo`` on two nodes."""
    on_ray = ["launch.type=ray", f"launch.ray_address={nodes.cluster.address}", f"launch.ray_resources={{{each}}}"]
    arguments = ["recipe", "run", "arithmetic_grpo", *settings, *on_ray, "trainer.nodes=2"]
    return subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def test_two_nodes_train_what_two_ranks_of_one_machine_do(nodes: Nodes, tiny_model: Path, tmp_path: Path) -> None:
    output = finished(start(nodes, *overrides(tiny_model, tmp_path, "ray")))
    assert "step 3/3" in output
    local = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "local", "trainer.nproc=2"))
    assert local.returncode == 0, local.stdout
    apart, together = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("ray", "local"))
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-4, atol=1e-5)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_goes_on_when_a_node_dies_and_another_comes(
    nodes: Nodes, tiny_model: Path, tmp_path: Path, which: int
) -> None:
    more = ["trainer.total_steps=300", "trainer.save_every=5", "launch.restarts=1"]
    process = start(nodes, *overrides(tiny_model, tmp_path, "again", *more))
    until(lambda: (tmp_path / "again" / "checkpoints" / "step-000005").is_dir() or process.poll() is not None)
    nodes.kill(nodes.nodes[which])
    nodes.add()
    output = finished(process)
    assert "starting again from the newest checkpoint" in output
    draws = [one["draw"] for one in valid_outcomes(tmp_path / "again") if one["outcome"] == "trained"]
    assert len(draws) == len(set(draws)) == 300 * 4
    assert metrics(tmp_path / "again")[-1]["step"] == 300


def test_ctrl_c_leaves_nothing_on_any_node(nodes: Nodes, tiny_model: Path, tmp_path: Path) -> None:
    process = start(nodes, *overrides(tiny_model, tmp_path, "stopped", "trainer.total_steps=5000"))
    until(lambda: (tmp_path / "stopped" / "metrics.jsonl").is_file() or process.poll() is not None)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    until(lambda: processes_of(tmp_path) == [])


def test_a_cluster_that_is_too_small_is_told_with_what_it_has(nodes: Nodes, tiny_model: Path, tmp_path: Path) -> None:
    process = start(nodes, *overrides(tiny_model, tmp_path, "small", "launch.node_timeout=2"), each="trainer: 3")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "has no 2 nodes with 1 CPU, 3 trainer each" in output and "4 CPU, 1 trainer" in output


def test_no_cluster_is_told(tiny_model: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tmp_path, "none", "launch.type=ray", "launch.ray_address=127.0.0.1:1")
    result = run("recipe", "run", "arithmetic_grpo", *settings)
    assert result.returncode == 2, result.stdout
    assert "no Ray cluster answers at 127.0.0.1:1" in result.stdout and "Traceback" not in result.stdout


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)
