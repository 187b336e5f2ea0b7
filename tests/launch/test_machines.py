"""Machines of a run that find one another, and those that do not fit."""

import json
import shutil
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.host.process import write_json
from agentrl.launch import joined_run, machines
from agentrl.launch.addresses import MachineError, collective_env, own_address
from agentrl.launch.commands import ALONE, Meeting
from agentrl.launch.door import Visit
from agentrl.launch.fleet import FAILED, Fleet
from agentrl.launch.machines import HEAD_FILE, Head, Machine, announce, gather, join, require_fit
from agentrl.launch.supervisor import ChildFailed

HERE = Machine("alpha", {"python": "3.11.7", "torch": "2.13.0"}, "llama", "run")
HEAD = Head("run", "127.0.0.1", 1234, False, HERE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "POLL_SECONDS", 0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "model"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "processes").mkdir(parents=True)
    return tmp_path / "run"


def recipe(model: Path, *, rank: int = 0, nodes: int = 2, seconds: float = 60.0, head: str = "127.0.0.1") -> Recipe:
    launch = {"head": head, "node_rank": rank, "node_timeout": seconds}
    data = {"model": {"name": str(model)}, "env": {"id": "arithmetic"}, "trainer": {"nodes": nodes}, "launch": launch}
    return Recipe.model_validate(data)


def write_config(run_dir: Path, given: Recipe) -> None:
    (run_dir / "config.json").write_text(given.model_dump_json())


def nothing() -> None:
    """Finds no failure."""


def test_a_run_on_one_machine_writes_nothing_and_waits_for_none(model: Path, run_dir: Path) -> None:
    alone = Recipe.model_validate({"model": {"name": str(model)}, "env": {"id": "arithmetic"}})
    fleet = Fleet(alone, model, run_dir, "secret", resume=False)
    assert fleet.head is None and list((run_dir / "processes").iterdir()) == []
    assert fleet.meeting(nothing, print) == (ALONE, {}) and fleet.news() == []


def test_machines_meet_at_the_head(model: Path, run_dir: Path) -> None:
    """Over what an earlier run left: a file of a head that does not answer, and one of a machine of that run."""
    stale = replace(HEAD, run="old", port=free_port(), machine=replace(HERE, run="old"))
    write_config(run_dir, recipe(model))
    write_json(run_dir / "processes" / HEAD_FILE, asdict(stale))
    write_json(run_dir / "processes" / "node-1.json", asdict(replace(HERE, run="old")))
    waits: list[str] = []
    found: list[tuple[Recipe, Path, Head]] = []
    asked: list[Recipe] = []
    waiting = threading.Event()

    def say(text: str) -> None:
        waits.append(text)
        waiting.set()

    def find(theirs: Recipe) -> Path:
        asked.append(theirs)
        return model

    other = threading.Thread(target=lambda: found.append(join(recipe(model, rank=1), run_dir, find, say)))
    other.start()
    assert waiting.wait(60)
    fleet = Fleet(recipe(model), model, run_dir, "secret", resume=True)
    head = fleet.head
    assert head is not None and head.resume
    said: list[str] = []
    meeting, env = fleet.meeting(nothing, said.append)
    assert meeting == Meeting("127.0.0.1", head.port, 0) and said == ["waiting for 1 more of trainer.nodes=2"]
    assert env == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with socket.create_server(("127.0.0.1", head.port)):  # torchrun of the head
        other.join(60)
    theirs, folder, answered = found[0]
    fleet.close()
    assert theirs == recipe(model) and folder == model and answered == head
    assert f"cannot connect to 127.0.0.1:{stale.port} yet" in waits[0]
    assert len(asked) == 2, "the model is looked for once for each head"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_two_machines_of_one_number_end_a_run_of_trainer_ranks(model: Path, run_dir: Path) -> None:
    """A command copied to two machines: torch would have ranks twice, and wait."""
    fleet = Fleet(recipe(model), model, run_dir, "secret", resume=False)
    assert fleet.head is not None
    visits = []
    for host in ("beta", "gamma"):
        write_json(run_dir / "processes" / "node-1.json", asdict(replace(HERE, host=host)))
        visits.append(Visit("127.0.0.1", fleet.head.door, "secret", 1))
    with pytest.raises(ChildFailed, match=r"two machines run with launch.node_rank=1, the later one is gamma"):
        for _ in range(1000):
            assert fleet.news() == []
            time.sleep(0.01)
    for visit in visits:
        visit.leave()
    fleet.close()


def test_a_port_that_is_taken_is_told(model: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.port"):  # the next two are used, too
        load_recipe("arithmetic_grpo", ["trainer.nodes=2", "launch.head=h", "launch.port=65535", "launch.device=cpu"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = recipe(model)
        launch = own.launch.model_copy(update={"port": port})
        with pytest.raises(MachineError, match=rf"launch.port={port} is taken on this machine"):
            announce(own.model_copy(update={"launch": launch}), model, run_dir, resume=False)


def test_a_machine_that_does_not_come_is_named_with_the_command(model: Path, run_dir: Path) -> None:
    write_json(run_dir / "processes" / "node-2.json", asdict(HERE))
    with pytest.raises(MachineError) as caught:
        gather(recipe(model, nodes=4, seconds=0.05), HEAD, run_dir, nothing)
    text = str(caught.value)
    assert "node 1, 3 of trainer.nodes=4 did not come within 0.05 s (launch.node_timeout)" in text
    assert "launch.node_rank=1" in text and str(run_dir) in text


def test_a_run_that_fails_meanwhile_is_not_waited_for(model: Path, run_dir: Path) -> None:
    def failed() -> None:
        raise RuntimeError("the server ended")

    with pytest.raises(RuntimeError, match="the server ended"):
        gather(recipe(model), HEAD, run_dir, failed)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(HERE, versions={"python": "3.11.7", "torch": "2.12.0"}), "torch 2.12.0 instead of 2.13.0"),
        (replace(HERE, versions={"python": "3.11.7"}), "torch not installed instead of 2.13.0"),
        (replace(HERE, model="qwen"), "another model"),
    ],
)
def test_a_machine_that_differs_is_refused_by_name(other: Machine, words: str) -> None:
    with pytest.raises(MachineError) as caught:
        require_fit(HERE, replace(other, host="beta"), 1)
    assert words in str(caught.value) and "node 1 (beta)" in str(caught.value) and "alpha" in str(caught.value)


def test_a_folder_that_the_head_empties_meanwhile_is_written_to_again(model: Path, run_dir: Path) -> None:
    """A run that starts again removes what its last start left."""
    here, processes = Machine.here(model, "new"), run_dir / "processes"
    write_config(run_dir, recipe(model))
    write_json(processes / HEAD_FILE, asdict(replace(HEAD, run="old", port=free_port())))
    with socket.create_server(("127.0.0.1", 0)) as torchrun:
        head = replace(HEAD, run="new", port=torchrun.getsockname()[1], machine=here)

        waits: list[str] = []

        def find(theirs: Recipe) -> Path:
            if not waits:
                shutil.rmtree(processes)
            return model

        def say(text: str) -> None:
            processes.mkdir(exist_ok=True)
            write_json(processes / HEAD_FILE, asdict(head))
            waits.append(text)

        assert join(recipe(model, rank=1), run_dir, find, say)[2] == head
    assert len(waits) == 1 and json.loads((processes / "node-1.json").read_text())["run"] == "new"


@pytest.mark.parametrize(("name", "known"), [("torch", "1.0"), ("agentrl's files", "0123")])
def test_a_machine_that_comes_later_in_the_place_of_another_is_compared_too(
    model: Path, run_dir: Path, name: str, known: str
) -> None:
    """The head of a run that goes on waits for nobody."""
    here = Machine.here(model, "run")
    write_config(run_dir, recipe(model))
    with socket.create_server(("127.0.0.1", 0)) as torchrun:
        port, versions = torchrun.getsockname()[1], here.versions | {name: known}
        head = replace(HEAD, port=port, machine=replace(here, host="alpha", versions=versions))
        write_json(run_dir / "processes" / HEAD_FILE, asdict(head))
        with pytest.raises(MachineError, match=rf"node 1 \(.*\) has {name} .* instead of {known} as on the head"):
            join(recipe(model, rank=1), run_dir, lambda theirs: model, print)


def test_two_checkouts_of_one_version_differ_where_a_file_does(tmp_path: Path) -> None:
    for name, text in (("one", "x = 1"), ("same", "x = 1"), ("other", "x = 2")):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "loss.py").write_text(text)
    one, same, other = (machines.source_fingerprint(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same != other
    (tmp_path / "same" / "envs").mkdir()
    (tmp_path / "same" / "envs" / "mine.py").touch()
    assert machines.source_fingerprint(tmp_path / "same") == one
    (tmp_path / "same" / "train" / "loss.py").rename(tmp_path / "same" / "loss.py")
    assert machines.source_fingerprint(tmp_path / "same") != one
    assert "agentrl's files" in machines.versions()


def test_a_head_that_does_not_come_is_told_with_the_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        join(recipe(model, rank=1, seconds=0.05), tmp_path / "elsewhere", lambda _: model, lambda _: None)
    assert "waited 0.05 s (launch.node_timeout) for the head at 127.0.0.1" in str(caught.value)
    assert "is launch.run_dir on a shared disk?" in str(caught.value)


def test_a_number_that_the_run_does_not_have_is_refused(model: Path, run_dir: Path) -> None:
    write_config(run_dir, recipe(model))
    write_json(run_dir / "processes" / HEAD_FILE, asdict(HEAD))
    with pytest.raises(MachineError, match=r"launch.node_rank=2: the head's run has trainer.nodes=2"):
        join(recipe(model, rank=2, nodes=3), run_dir, lambda _: model, lambda _: None)


def test_a_head_that_nobody_knows_and_an_interface_that_is_not_there_are_told() -> None:
    """On each machine, before anything starts: a name without an address ended in a traceback."""
    for find in (own_address, collective_env):
        with pytest.raises(MachineError, match=r"launch\.head=nobody\.invalid: .* finds no way to it"):
            find("nobody.invalid")
        with pytest.raises(MachineError, match=r"launch\.interface=eth99: .* it has .*lo"):
            find("127.0.0.1", "eth99")


def test_an_address_of_another_machine_is_no_head(model: Path, run_dir: Path) -> None:
    with pytest.raises(MachineError, match="is no address of this machine"):
        announce(recipe(model, head="192.0.2.1"), model, run_dir, resume=False)


def test_a_machine_whose_ranks_cannot_reach_others_tells_the_head(
    model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, tried = recipe(model, rank=1, nodes=3), []
    for rank in (1, 2):
        write_json(run_dir / "processes" / f"node-{rank}.json", asdict(HERE))

    def unreachable(others: dict[int, Machine]) -> None:
        tried.extend(sorted(others))
        raise MachineError("beta cannot connect to node 2")

    monkeypatch.setattr(joined_run, "join", lambda *_: (given, model, HEAD))
    monkeypatch.setattr(joined_run, "require_reach", unreachable)
    with pytest.raises(MachineError, match="beta cannot connect to node 2"):
        joined_run._joined(given, run_dir, Console(), print, None)
    assert tried == [0, 2], "the head and the others, not itself"
    said = json.loads((run_dir / "processes" / FAILED / "1.json").read_text())
    assert said["error"] == "beta cannot connect to node 2" and said["refused"]


def test_half_a_file_is_waited_for(model: Path, run_dir: Path) -> None:
    (run_dir / "processes" / "node-1.json").write_text(json.dumps(asdict(HERE))[:20])
    begun = time.monotonic()
    with pytest.raises(MachineError, match="node 1 of"):
        gather(recipe(model, seconds=0.05), HEAD, run_dir, nothing)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trainer": {"nodes": 2}}, "trainer.nodes=2 needs launch.head=HOST"),
        ({"launch": {"node_rank": 1}}, "launch.node_rank=1 is not below trainer.nodes=1"),
        ({"launch": {"head": "a"}}, "launch.head=a does nothing with trainer.nodes=1"),
        ({"launch": {"port": 5}}, "launch.port=5 does nothing with trainer.nodes=1"),
        ({"trainer": {"nodes": 2, "type": None}, "launch": {"head": "a"}}, "does nothing with trainer.type=null"),
    ],
)
def test_settings_that_contradict_one_another(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recipe.model_validate({"model": {"name": "m"}, "env": {"id": "arithmetic"}, **settings})
