"""Runs on a real Ray cluster of virtual nodes on this machine: ``make test-cluster``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.load import load_recipe
from agentrl.launch.ray_nodes import ask, place
from agentrl.launch.ray_run import connect
from agentrl.launch.save_and_stop import SAVED_CODE
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.train.checkpoint_state import STOP_FILE, latest_checkpoint
from tests.end_to_end import command, environment, metrics, overrides, processes_of, run

pytest.importorskip("ray", reason="Ray is an extra: make test-cluster installs it")
from tests.cluster.ray_cluster import RayCluster  # needs Ray

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes for trainer ranks and one for servers; a test that kills one adds another."""
    made = RayCluster()
    for resources in ({"trainer": 1}, {"trainer": 1}, {"server": 1}):
        made.add(**resources)
    yield made
    made.close()


class Run:
    """A run of ``arithmetic_grpo`` on the cluster, on two nodes unless told otherwise."""

    def __init__(self, cluster: RayCluster | str, folder: Path, *settings: str, each: str = "trainer: 1") -> None:
        self.out = folder / "out.log"
        address = cluster if isinstance(cluster, str) else cluster.address
        on_ray = ["launch.type=ray", f"launch.ray_address={address}", f"launch.ray_resources={{{each}}}"]
        arguments = ["recipe", "run", "arithmetic_grpo", "trainer.nodes=2", *settings, *on_ray]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(command(*arguments), env=environment(), stdout=out, stderr=out)

    @property
    def output(self) -> str:
        """What the command has printed."""
        return self.out.read_text()

    def until(self, true: Callable[[], bool], seconds: float = 300) -> None:
        """Waits until something is so; fails when the run ends before."""
        deadline = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def ended(self, code: int = 0, seconds: float = 600) -> str:
        """Waits for the end, and returns the output."""
        self.process.wait(seconds)
        assert self.process.returncode == code, self.output
        print("\n".join(line for line in self.output.splitlines() if not line.startswith("step ")))
        return self.output


def test_two_nodes_train_what_two_ranks_of_one_machine_do(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    output = Run(cluster, tmp_path, *overrides(tiny_model, tmp_path, "ray")).ended()
    assert "step 3/3" in output
    local = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "local", "trainer.nproc=2"))
    assert local.returncode == 0, local.stdout
    apart, together = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("ray", "local"))
    for name, tensor in together.items():
        torch.testing.assert_close(apart[name], tensor, rtol=1e-4, atol=1e-5)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("which", ["head", "other"])
def test_a_run_goes_on_when_a_node_of_the_trainer_dies_and_another_comes(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path, which: str
) -> None:
    steps = 100
    more = [f"trainer.total_steps={steps}", "trainer.save_every=5", "launch.restarts=1", "trainer.keep_checkpoints=9"]
    again = Run(cluster, tmp_path, *overrides(tiny_model, tmp_path, "again", *more))
    again.until(lambda: (tmp_path / "again" / "checkpoints" / "step-000005").is_dir())
    cluster.kill(cluster.node_of(again_log(tmp_path, which)))
    cluster.add(trainer=1)
    output = again.ended()
    assert "starting again from the newest checkpoint" in output
    assert output.count("evaluation at step 0") == 1, "what the first start printed is not shown again"
    assert exactly_once(tmp_path / "again") == steps


def again_log(folder: Path, which: str) -> str:
    """Text in the command line of the launcher of the head, or of node 1, on Ray's node."""
    return f"{folder}/again.ray.yaml launch.node_rank={0 if which == 'head' else 1}"


def exactly_once(run_dir: Path) -> int:
    """Whether the journal proves that each draw of each step was trained once, and nothing else; returns the steps."""
    steps = metrics(run_dir)[-1]["step"]
    draws = [one["draw"] for one in valid_outcomes(run_dir) if one["outcome"] == "trained"]
    assert len(draws) == len(set(draws)) == steps * 4
    checked = run("runs", "check", run_dir.name, "--run-dir", str(run_dir.parent))
    assert checked.returncode == 0, checked.stdout
    return steps


def test_a_run_that_loses_each_kind_of_node_in_turn_has_the_journal_of_an_undisturbed_one(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Three nodes: the trainer and the controller, a rollout worker, a server; an actor alone dies, too."""
    run_dir, steps = tmp_path / "disturbed", 100
    kinds = ["trainer.nodes=1", "rollout.nodes=1", "rollout.workers=1", "inference.nodes=1"]
    own = ["launch.ray_server_resources={server: 1}", "launch.ray_worker_resources={worker: 1}", "launch.restarts=1"]
    more = [
        f"trainer.total_steps={steps}",
        "trainer.save_every=5",
        "inference.probe_seconds=0.5",
        "inference.patience=300",
    ]
    cluster.add(worker=1)
    disturbed = Run(cluster, tmp_path, *overrides(tiny_model, tmp_path, "disturbed", *more, *own, *kinds))
    for rank, kind, said in ((2, "server", "has joined in place of"), (1, "worker", "its rollout workers start")):
        step = step_of(run_dir)
        disturbed.until(lambda step=step: step_of(run_dir) >= step + 3)
        cluster.kill(cluster.node_of(f"{run_dir}.ray.yaml launch.node_rank={rank}"))
        cluster.add(**{kind: 1})
        disturbed.until(lambda said=said: said in disturbed.output)
    starts = disturbed.output.count("its rollout workers start")
    cluster.actor_of(f"{run_dir}.ray.yaml launch.node_rank=1").kill()
    disturbed.until(lambda: disturbed.output.count("its rollout workers start") > starts)
    step = step_of(run_dir)
    disturbed.until(lambda: step_of(run_dir) >= step + 3 and latest_checkpoint(run_dir / "checkpoints") is not None)
    cluster.kill(cluster.node_of(f"{run_dir}.ray.yaml launch.node_rank=0"))
    cluster.add(trainer=1)
    output = disturbed.ended()
    assert output.count("starting again from the newest checkpoint") == 1
    for rank in (1, 2):
        said = run_dir.with_name(f"disturbed.ray-{rank}.log").read_text()
        assert "Traceback" not in said, said
        print(f"node {rank} said:", said)
    assert exactly_once(run_dir) == steps
    local = run("recipe", "run", "arithmetic_grpo", *overrides(tiny_model, tmp_path, "undisturbed", more[0]))
    assert local.returncode == 0, local.stdout
    assert journal(run_dir) == journal(tmp_path / "undisturbed")


def journal(run_dir: Path) -> list[tuple[object, ...]]:
    """Outcome of each draw, and its step."""
    found = ((one["draw"], one["task"], one["outcome"], one["step"]) for one in valid_outcomes(run_dir))
    return sorted(found, key=lambda one: one[0])


def test_servers_come_with_new_nodes_and_are_replaced_when_theirs_dies(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "grows"
    apart = ["trainer.nodes=1", "inference.nodes=1", "inference.servers=1..2"]
    more = ["trainer.total_steps=100000", "inference.probe_seconds=0.5", "launch.ray_server_resources={server: 1}"]
    grows = Run(cluster, tmp_path, *overrides(tiny_model, tmp_path, "grows", *more, *apart))
    grows.until(lambda: step_of(run_dir) >= 2)
    cluster.add(server=1)
    grows.until(lambda: "server 1 on node 2" in grows.output and "has joined" in grows.output)
    cluster.kill(cluster.node_of(f"{run_dir}.ray.yaml launch.node_rank=1"))
    grows.until(lambda: "its servers are started elsewhere" in grows.output)
    cluster.add(server=1)
    grows.until(lambda: "has joined in place of" in grows.output)
    step = step_of(run_dir)
    grows.until(lambda: step_of(run_dir) >= step + 3)
    (run_dir / "processes" / STOP_FILE).touch()
    output = grows.ended(SAVED_CODE)
    assert "starting again" not in output
    assert exactly_once(run_dir) > step
    secret = json.loads((run_dir / "processes" / "secret.json").read_text())["secret"]
    shown = [file for file in tmp_path.rglob("*.log") if secret in file.read_text(errors="replace")]
    assert not shown, "the run's secret stands in a log"


def step_of(run_dir: Path) -> int:
    """Number of the latest recorded step."""
    return max((one["step"] for one in metrics(run_dir)), default=0) if (run_dir / "metrics.jsonl").is_file() else 0


@pytest.mark.parametrize("kind", ["address", "client_address"])
def test_ctrl_c_leaves_nothing_on_any_node(cluster: RayCluster, tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """Also by ``ray://``, as from a machine that is no node of the cluster."""
    stopped = Run(
        getattr(cluster, kind), tmp_path, *overrides(tiny_model, tmp_path, "stopped", "trainer.total_steps=5000")
    )
    stopped.until(lambda: (tmp_path / "stopped" / "metrics.jsonl").is_file())
    os.kill(stopped.process.pid, signal.SIGINT)
    stopped.ended(130)
    deadline = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, processes_of(tmp_path)
        time.sleep(0.2)


def test_a_launcher_sees_the_gpus_of_its_run_alone(cluster: RayCluster, tmp_path: Path) -> None:
    """Two runs with a GPU each on one node of three."""
    import ray

    cluster.add(GPU=3, card=3)
    settings = ["inference.urls=[http://127.0.0.1:1]", f"launch.ray_address={cluster.address}", "launch.device=cuda"]
    one = load_recipe("arithmetic_grpo", ["launch.type=ray", *settings, "launch.ray_resources={card: 1}"])
    connect(one)
    try:
        seen = []
        for number in range(2):
            (placed,) = place(one)
            ask(placed.asked, 60)
            said = tmp_path / f"{number}.txt"
            said.touch()
            names = "('CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS')"
            print_it = [sys.executable, "-c", f"import os; print(*map(os.environ.get, {names}))"]
            assert ask(placed.actor.start.remote(print_it, {}, str(said), str(tmp_path))) == ""
            while ask(placed.actor.poll.remote()) is None:
                time.sleep(0.1)
            seen.append(said.read_text().split())
        assert len({one for one, _ in seen}) == 2 and {one for one, _ in seen} < {"0", "1", "2"}, seen
        assert [threads for _, threads in seen] == ["None", "None"], "Ray's one thread would slow a CPU's servers"
    finally:
        ray.shutdown()


def test_a_cluster_that_the_run_starts_ends_with_it(tiny_model: Path, tmp_path: Path) -> None:
    alone = Run("local", tmp_path, *overrides(tiny_model, tmp_path, "alone", "trainer.nodes=1"))
    alone.until(lambda: (tmp_path / "alone" / "metrics.jsonl").is_file())
    family = psutil.Process(alone.process.pid).children(recursive=True)
    assert any(one.name() == "raylet" for one in family)
    assert "RAY_AUTH_TOKEN" in psutil.Process(alone.process.pid).children()[0].environ(), "nobody else is let in"
    assert "step 3/3" in alone.ended()
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_cluster_that_is_too_small_is_told_with_what_it_has(
    cluster: RayCluster, tiny_model: Path, tmp_path: Path
) -> None:
    small = Run(
        cluster, tmp_path, *overrides(tiny_model, tmp_path, "small", "launch.node_timeout=2"), each="trainer: 3"
    )
    output = small.ended(2)
    assert "has no 2 nodes with 1 CPU, 3 trainer each" in output and "4 CPU, 1 trainer" in output


def test_a_cluster_with_tokens_lets_in_who_knows_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides(tiny_model, tmp_path, "token", "launch.type=ray", "launch.ray_resources={trainer: 1}")
    token = "1" * 64
    made = RayCluster(token)
    try:
        for env, words in (
            ({}, "A cluster with tokens needs RAY_AUTH_MODE=token"),
            ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "2" * 64}, "A cluster with tokens needs RAY_AUTH_MODE=token"),
            ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}, "has no 1 nodes with 1 CPU, 1 trainer each"),
        ):
            for name, value in env.items():
                monkeypatch.setenv(name, value)
            asked = [f"launch.ray_address={made.address}", "launch.node_timeout=2"]
            result = run("recipe", "run", "arithmetic_grpo", *settings, *asked)
            assert result.returncode == 2 and words in result.stdout, result.stdout
            assert "Traceback" not in result.stdout and token not in result.stdout
    finally:
        made.close()


def test_no_cluster_is_told(tiny_model: Path, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tmp_path, "none", "launch.type=ray", "launch.ray_address=127.0.0.1:1")
    result = run("recipe", "run", "arithmetic_grpo", *settings)
    assert result.returncode == 2, result.stdout
    assert "no Ray cluster answers at 127.0.0.1:1" in result.stdout and "Traceback" not in result.stdout
