"""Which machine of a run does what, and what cannot be placed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from agentrl.config.errors import ConfigError, UserError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.launch import placement
from agentrl.launch.placement import Node, gpus, lines, most_machines, node, nodes, served_beyond, server_problems
from agentrl.launch.resolve import resolve
from agentrl.launch.run_checks import check_names
from tests.end_to_end import run


def recipe(*settings: str) -> Recipe:
    return load_recipe("arithmetic_grpo", ["launch.device=cpu", *settings])


NEAR = """
from agentrl.inference.kinds.kind import ServerKind

class Near(ServerKind):
    def command(self, start):
        return [start.python]

    def backend(self, url, timeout):
        raise NotImplementedError
"""
APART = ("launch.head=h", "trainer.nodes=2", "inference.nodes=2", "inference.servers=5")


WORKERS = ("rollout.nodes=1", "rollout.workers=1")


def test_trainer_ranks_stand_first_and_every_server_on_one_machine() -> None:
    assert nodes(recipe()) == [Node(0, True)]
    assert nodes(recipe(*APART)) == [Node(0, True), Node(1, True), Node(2, False, (0, 2, 4)), Node(3, False, (1, 3))]
    with pytest.raises(ValueError, match=r"launch.node_rank=4: the run has trainer.nodes=2 \+ inference.nodes=2"):
        node(recipe(*APART), 4)


def test_rollout_workers_stand_between_the_trainer_and_the_servers() -> None:
    given = recipe(*APART, "rollout.nodes=2", "rollout.workers=3")
    assert nodes(given)[1:4] == [Node(1, True), Node(2, False, workers=(0, 2)), Node(3, False, workers=(1,))]
    assert nodes(given)[4:] == [Node(4, False, (0, 2, 4)), Node(5, False, (1, 3))]
    assert lines(given)[0].startswith("head: controller; ") and lines(given)[2] == "node 2: rollout worker 0, 2"
    grown = recipe(*APART, "rollout.nodes=2", "rollout.workers=3", "inference.servers=5..6")
    assert most_machines(grown) == 7 and node(grown, 6).servers == (5,)
    with pytest.raises(ValueError, match=r"trainer.nodes=2 \+ rollout.nodes=2 \+ inference.nodes=2"):
        node(given, 6)


def test_a_machine_of_workers_needs_no_gpu() -> None:
    given = recipe(*APART, "rollout.nodes=1", "rollout.workers=4", "launch.device=cuda")
    assert gpus(given, node(given, 2)) == 0


@pytest.mark.parametrize(("most", "machines", "later"), [(5, 4, []), (6, 5, [(5,)]), (10, 6, [(5, 6, 7), (8, 9)])])
def test_machines_that_come_later_run_the_servers_up_to_the_most(
    most: int, machines: int, later: list[tuple[int, ...]]
) -> None:
    given = recipe(*APART, f"inference.servers=5..{most}")
    assert given.inference.servers == 5 and most_machines(given) == machines
    assert [node(given, rank).servers for rank in range(4, machines)] == later
    numbers = [number for rank in range(machines) for number in node(given, rank).servers]
    assert sorted(numbers) == list(range(most))


def test_gpus_of_a_machine_are_those_of_its_ranks_and_servers() -> None:
    sized = ("launch.device=cuda", "trainer.nproc=8", "inference.engine=sglang", "inference.tp=2", "inference.pp=2")
    assert [gpus(recipe(*APART, *sized), one) for one in nodes(recipe(*APART))] == [8, 8, 12, 8]
    assert gpus(recipe(*sized, "inference.servers=2"), Node(0, True)) == 16, "the head's servers stand beside its ranks"
    assert gpus(recipe(*APART), Node(2, False, (0, 1))) == 0


def test_servers_of_a_machine_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe("launch.device=cuda", "inference.engine=sglang", "inference.tp=2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert placement.visible_devices(given, 1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")  # as a scheduler gives them
    assert placement.visible_devices(given, 1) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert placement.visible_devices(recipe(), 1) == {}


def test_servers_beside_the_trainer_get_gpus_behind_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(known: list[str], count: int, *settings: str, before: int = 0) -> list[str]:
        given = recipe("launch.device=cuda", "trainer.nproc=2", *settings)
        return [placement.devices_beside(given, index, known, before)["CUDA_VISIBLE_DEVICES"] for index in range(count)]

    eight = [str(number) for number in range(8)]
    assert of(eight, 2, "inference.servers=2") == ["2", "3"]
    assert of(eight, 2, "inference.servers=2", "inference.engine=sglang", "inference.tp=2") == ["2,3", "4,5"]
    assert of(eight, 1, before=3) == ["5"], "a teacher's, behind the policy's servers"
    assert of(["GPU-a", "GPU-b", "GPU-c"], 1) == ["GPU-c"]
    assert of(["0"], 2) == ["0", "0"] and of(["0", "1"], 2) == ["0", "1"], "too few are shared in turn"
    assert of(eight, 1, "trainer.type=null") == ["0"], "no rank runs beside an evaluation"
    assert placement.devices_beside(recipe("launch.device=cuda"), 0, []) == {}, "not known"
    assert placement.devices_beside(recipe("launch.device=cpu"), 0, eight) == {}
    two = recipe("launch.device=cuda")
    assert placement.few_gpus(two, ["0"]).startswith("2 GPUs would be needed on this machine, which has 1")
    assert placement.few_gpus(two, ["0", "1"]) == placement.few_gpus(two, []) == ""
    assert placement.few_gpus(recipe("launch.device=cpu"), ["0"]) == "", "none is needed"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert placement.visible_gpus() == ["4", "6"]


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert placement.visible_gpus(tmp_path) == ["0", "1"]


def test_a_dry_run_says_who_stands_where() -> None:
    assert lines(recipe()) == []
    sized = ("trainer.nproc=4", "inference.engine=sglang", "inference.tp=2", "launch.device=cuda")
    assert lines(recipe(*APART, *sized)) == [
        "head: controller, rollouts; trainer ranks 0-3; 4 GPU",
        "node 1: trainer ranks 4-7; 4 GPU",
        "node 2: server 0, 2, 4 (sglang, tp 2); 6 GPU",
        "node 3: server 1, 3 (sglang, tp 2); 4 GPU",
    ]
    shown = run("recipe", "run", "arithmetic_grpo", "--dry-run", "name=x", *APART)
    assert shown.returncode == 0, shown.stdout
    assert "machine    node 3: server 1, 3 (embedded)" in shown.stdout and "weights    broadcast" in shown.stdout


def test_weights_of_servers_elsewhere_do_not_go_through_this_machines_memory() -> None:
    assert resolve(recipe(), None).weights.transport == "shm"
    assert resolve(recipe(*APART), None).weights.transport == "broadcast"
    assert resolve(recipe(*APART, "inference.engine=vllm"), None).weights.transport == "disk"
    copies = ("inference.engine=sglang", "inference.dp=2")
    assert resolve(recipe(*APART, *copies), None).weights.transport == "disk", "only tensor ranks are counted"
    with pytest.raises(ConfigError, match=r"weights.transport=shm does not leave this machine"):
        recipe(*APART, "weights.transport=shm")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["inference.nodes=2", "launch.head=a"], "inference.nodes=2 is larger than inference.servers=1"),
        (["inference.nodes=1"], "inference.nodes=1 needs launch.head=HOST"),
        (["inference.nodes=1", "launch.head=a", "inference.urls=[http://a:1]"], "does nothing with inference.urls"),
        (["inference.nodes=1", "launch.head=a", "trainer.type=null"], "does nothing with trainer.type=null"),
        (["inference.servers=2..3"], "needs inference.nodes=1 or more"),
        (["inference.servers=3..2"], "the smaller number first"),
        (["inference.servers=some"], "want a number, or LEAST..MOST"),
        (["inference.servers=1..3", "inference.nodes=1", "launch.type=slurm"], "has the nodes that it has"),
        (["inference.port=5"], "inference.port=5 does nothing with inference.nodes=0"),
        ([*APART, "rollout.nodes=2", "rollout.workers=1"], "rollout.nodes=2 is larger than rollout.workers=1"),
        (["rollout.nodes=1", "rollout.workers=1"], "rollout.nodes=1 needs launch.head=HOST"),
        (
            ["rollout.nodes=1", "rollout.workers=1", "trainer.type=null", "launch.head=h"],
            "does nothing with trainer.type",
        ),
        ([*APART, "rollout.nodes=1", "rollout.workers=1", "launch.node_rank=5"], "is not below trainer.nodes=2"),
        (["launch.type=ray", "launch.ray_worker_resources={CPU: 2}"], "does nothing with rollout.nodes=0"),
        (["launch.type=slurm", "launch.slurm.worker_args=[-p b]"], "worker_args does nothing with rollout.nodes=0"),
        (["launch.tls.certificate=c"], "launch.tls needs both certificate and key"),
        (["launch.tls.certificate=c", "launch.tls.key=k"], "launch.tls.certificate does nothing"),
        (["launch.slurm.server_args=[-p b]"], "launch.slurm does nothing with launch.type=local"),
        (["launch.slurm.server_args=[-p b]", "launch.type=slurm"], "server_args does nothing with inference.nodes=0"),
    ],
)
def test_settings_that_contradict_one_another(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(*settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["inference.tp=2"], "inference.tp=2: inference.engine=embedded has no such size"),
        (["inference.engine=sglang", "inference.tp=2", "inference.ep=4"], "inference.ep=4"),
        (["inference.engine=sglang", "inference.tp=2", "inference.urls=[http://a:1]"], "whose servers run already"),
    ],
)
def test_what_a_kind_of_server_cannot_do_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        for problem in server_problems(recipe(*settings)):
            raise UserError(problem)


def test_a_kind_that_says_nothing_of_other_machines_stands_on_the_head_alone(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text(NEAR)
    (found,) = server_problems(recipe(f"inference.engine={tmp_path}/near.py:Near", *APART))
    assert "cannot stand on other machines" in found
    (found,) = server_problems(recipe(f"inference.engine={tmp_path}/near.py:Near", "launch.head=h", *WORKERS))
    assert "rollout.nodes=1: " in found and "cannot be called from other machines" in found


def test_servers_have_the_runs_key_where_other_machines_call_them() -> None:
    assert not served_beyond(recipe()) and served_beyond(recipe(*APART))
    assert served_beyond(recipe("launch.head=h", *WORKERS)), "those on the head, too"
    assert not served_beyond(recipe("launch.head=h", *WORKERS, "inference.urls=[http://a:1]"))


def test_tls_files_that_cannot_be_used_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    files = [f"launch.tls.certificate={tmp_path}/c.pem", f"launch.tls.key={tmp_path}/none.pem"]
    with pytest.raises(UserError, match=r"launch.tls.certificate=.*cannot be used"):
        check_names(recipe(*APART, *files))


AT_A_TERMINAL = """
import os, sys
os.open(os.ttyname(0), os.O_RDWR)  # the terminal of this session, where OpenSSL would ask
from agentrl.config.errors import UserError
from agentrl.config.load import load_recipe
from agentrl.launch.run_checks import check_tls
try:
    check_tls(load_recipe("arithmetic_grpo", sys.argv[1:]))
except UserError as error:
    sys.stderr.write(str(error))
"""


def test_a_private_key_with_a_pass_phrase_is_refused_without_a_question(tmp_path: Path) -> None:
    """The run's other processes have no terminal to ask at."""
    made = trustme.CA().issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "c.pem"))
    plain = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    phrase = serialization.BestAvailableEncryption(b"phrase")
    pem = plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, phrase)
    (tmp_path / "k.pem").write_bytes(pem)
    files = [f"launch.tls.certificate={tmp_path}/c.pem", f"launch.tls.key={tmp_path}/k.pem"]
    ours, theirs = os.openpty()
    os.write(ours, b"phrase\n")
    command = [sys.executable, "-c", AT_A_TERMINAL, "launch.device=cpu", *APART, *files]
    ended = subprocess.run(command, stdin=theirs, stderr=subprocess.PIPE, text=True, start_new_session=True, check=True)
    for end in (ours, theirs):
        os.close(end)
    assert "launch.tls.key=" in ended.stderr and "cannot be used" in ended.stderr


SERVER = ["inference.engine=sglang", "inference.python=/bin/true", "inference.tp=2"]
TRAINER = ["trainer.nproc=2", "trainer.tensor_parallel=2"]


@pytest.mark.parametrize(
    ("launch", "sized", "words"),
    [
        ("launch.type=slurm", SERVER, "inference.tp=2 does not divide the model's 9 attention heads"),
        ("launch.type=ray", SERVER, "inference.tp=2 does not divide the model's 9 attention heads"),
        ("launch.type=local", SERVER, "inference.tp=2 does not divide the model's 9 attention heads"),
        ("launch.type=slurm", TRAINER, "trainer.tensor_parallel=2 does not divide the model's num_attention_heads=9"),
    ],
)
def test_heads_that_tensor_ranks_do_not_divide_are_refused_before_anything_is_queued(
    tmp_path: Path, launch: str, sized: list[str], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 9, "num_key_value_heads": 3}))
    found = run("recipe", "run", "arithmetic_grpo", f"model.name={tmp_path}", "launch.device=cpu", *sized, launch)
    assert found.returncode == 2 and words in found.stdout
