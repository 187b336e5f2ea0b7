"""What a run on Ray asks for, without a cluster; ``make test-cluster`` runs it on one."""

import os
import re
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.config.render import render
from agentrl.launch import needed_packages, ray_nodes
from agentrl.launch.machine_recipe import recipe_of_machine, run_folder
from agentrl.launch.ray_nodes import wanted
from agentrl.launch.ray_run import connect, give_token, own_cluster
from tests.without_packages import run_without

RAY = ["name=mine", "launch.type=ray", "launch.device=cpu", "trainer.nodes=2"]


def recipe(*settings: str) -> Recipe:
    return load_recipe("arithmetic_grpo", [*RAY, *settings])


def test_each_node_has_the_gpus_of_its_ranks_and_servers() -> None:
    assert wanted(recipe("trainer.nproc=4", "launch.device=cpu")) == {"CPU": 1}
    beside = recipe("trainer.nproc=4", "launch.device=cuda", "inference.servers=2")
    assert wanted(beside) == {"CPU": 1, "GPU": 6} and wanted(beside, 1) == {"CPU": 1, "GPU": 4}
    sized = ["inference.engine=sglang", "inference.tp=2", "inference.servers=3..5", "inference.nodes=2"]
    apart = recipe("trainer.nproc=4", "launch.device=cuda", *sized, "launch.ray_server_resources={server: 1}")
    assert [wanted(apart, rank).get("GPU") for rank in range(5)] == [4, 4, 4, 4, 4]
    assert wanted(apart, 2) == {"CPU": 1, "GPU": 4, "server": 1}
    workers = ["rollout.nodes=1", "rollout.workers=9", "launch.ray_worker_resources={CPU: 9}", "launch.device=cuda"]
    assert wanted(recipe(*workers, "inference.nodes=1"), 2) == {"CPU": 9}
    assert wanted(recipe("launch.device=cpu", "launch.ray_resources={CPU: 8, trainer: 1}")) == {"CPU": 8, "trainer": 1}
    few = "launch.ray_resources={GPU: 2}"
    assert wanted(recipe("trainer.nproc=4", "launch.device=cuda", few), 1)["GPU"] == 4, "never fewer than it needs"
    with pytest.raises(ConfigError, match=r"launch.ray_resources.CPU was -1 .* must be a number, at least 0"):
        recipe("launch.device=cpu", "launch.ray_resources={CPU: -1}")


def test_the_launchers_run_the_same_recipe_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ["rollout.nodes=1", "rollout.workers=1", "inference.nodes=1"]
    ray = ["address=10.0.0.5:6379", "resources={a: 1}", "server_resources={b: 1}", "worker_resources={c: 1}"]
    given = recipe("seed=5", "launch.restarts=3", *kinds, *(f"launch.ray_{one}" for one in ray))
    assert len(ray) == sum(name.startswith("ray_") for name in type(given.launch).model_fields), "all keys of Ray"
    file = tmp_path / "machine.yaml"
    file.write_text(render(recipe_of_machine(given), comments=False))
    each = load_recipe(str(file), ["launch.head=10.0.0.5", "launch.node_rank=1"])
    assert each.seed == 5 and each.launch.type == "local" and each.trainer.nodes == 2
    assert run_folder(each) == run_folder(given) == tmp_path / "runs" / "mine"


def test_a_node_that_sees_other_files_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "SHARED_SECONDS", 0.0)
    monkeypatch.setattr(ray_nodes, "SHARED_POLL", 0.0)
    host, log, command = ray_nodes.Host(), tmp_path / "mine.ray.log", [sys.executable, "-c", "print(2 + 3)"]
    assert "mine.ray.log is not there, which was just written" in host.start(command, {}, str(log), str(tmp_path))
    log.write_text("$ command\n")
    missing = tmp_path / "elsewhere"
    assert host.start(command, {}, str(log), str(missing)) == f"{missing}: No such file or directory"
    assert host.poll() is None
    assert host.start(command, {}, str(log), str(tmp_path)) == ""
    assert host._process is not None and host._process.wait(60) == 0
    assert log.read_text() == "$ command\n5\n"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_an_address_where_nothing_listens_is_told_at_once(address: str) -> None:
    """Ray would try for more than four minutes."""
    with pytest.raises(ray_nodes.RayError, match=f"no Ray cluster answers at {re.escape(address)} ") as caught:
        connect(recipe(f'launch.ray_address="{address}"'))
    assert "Connection refused" in str(caught.value)


class RayError(Exception):
    """As that of Ray's own name."""


@pytest.mark.parametrize("error", [RuntimeError, ConnectionError, RayError])
def test_what_ray_says_in_several_lines_is_told_in_one(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as another version in the cluster, or a token that is missing."""
    fake, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    exceptions.RayError = RayError  # type: ignore[attr-defined]
    fake.exceptions = exceptions  # type: ignore[attr-defined]

    def init(**_: object) -> None:
        raise error("Version mismatch: The cluster was started with:\n    Ray: 2.9\nThis process with:\n    Ray: 2.60")

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    with pytest.raises(ray_nodes.RayError, match=r"with: Ray: 2.9 This process with: Ray: 2.60\)") as caught:
        connect(recipe("launch.ray_address=auto"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["RayActorError", "OutOfMemoryError", "GetTimeoutError", "ActorUnschedulableError"])
def test_an_actor_that_ray_kills_is_a_lost_node(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ray itself kills it, because its machine has too little memory."""
    fake, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    kinds = ("RayActorError", "OutOfMemoryError", "GetTimeoutError", "ActorUnschedulableError")
    made = {name: type(name, (Exception,), {}) for name in kinds}
    vars(exceptions).update(made)

    def get(reference: object, timeout: float) -> None:
        raise made[kind]("1 worker was killed\nset RAY_memory_monitor_refresh_ms")

    fake.get = get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    said = "1 worker was killed" if kind == "OutOfMemoryError" else "set RAY"
    with pytest.raises(ray_nodes.NodeLost, match=f"a node of the run is gone: {said}"):
        ray_nodes.ask(object())


def test_the_package_of_a_client_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would fail to import it."""
    monkeypatch.setattr(needed_packages, "find_spec", lambda name: None if name == "grpc" else name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        said = re.escape(f"the Ray address {address} needs grpc, not installed: pip install -e '.[ray]'")
        with pytest.raises(needed_packages.MissingPackageError, match=said):
            connect(recipe(f"launch.ray_address={address}"))


def test_a_cluster_of_this_machine_alone_has_the_named_resources_and_takes_no_second_machine() -> None:
    settings = ["name=mine", "launch.type=ray", "launch.ray_address=local", "launch.ray_resources={CPU: 2, trainer: 1}"]
    own = own_cluster(load_recipe("arithmetic_grpo", settings))
    assert own["resources"] == {"trainer": 1}, "Ray counts CPUs and GPUs itself"
    with pytest.raises(ConfigError, match=r"a cluster of this machine alone, too small for trainer.nodes=2"):
        recipe("launch.ray_address=local")


def test_a_cluster_of_our_own_has_its_own_token_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    for name in names:
        monkeypatch.setenv(name, "")  # so that all are as before afterwards
    for chosen in (None, *names):
        for name in names:
            monkeypatch.setenv(name, "theirs") if name == chosen else monkeypatch.delenv(name, raising=False)
        give_token()
        given = os.environ.get("RAY_AUTH_TOKEN")
        expected = {None: len(given or "") == 64, "RAY_AUTH_TOKEN": given == "theirs"}
        assert expected.get(chosen, given is None), (chosen, given)


def test_the_extra_is_named(tmp_path: Path) -> None:
    result = run_without(["ray"], ["recipe", "run", "arithmetic_grpo", *RAY], tmp_path / "site", tmp_path)
    assert result.returncode == 2, result.stdout
    assert "launch.type=ray needs ray, not installed: pip install -e '.[ray]'" in result.stdout
    assert list(tmp_path.glob("runs*")) == []


@pytest.mark.parametrize("setting", ["launch.restarts=1", "launch.ray_resources={a: 1}", "launch.ray_address=a"])
def test_keys_of_ray_are_refused_elsewhere(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.{setting.split('=')[0][7:]} does nothing with launch.type=local"):
        load_recipe("arithmetic_grpo", [setting])
