"""Weights through a process group: a sender in this process, a server in another one."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.weight_manifest import checksum
from agentrl.engine.weight_store import raw_bytes
from agentrl.launch.supervisor import Supervisor
from agentrl.weights.update_group import UpdateGroup, open_store
from tests.engine.driving import SECONDS


class Sender:
    """Rank 0 of a group of two; the server's calls are made from a thread while it waits."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client = client
        self.name = name
        self.store = open_store("127.0.0.1", 2, SECONDS)
        self.group: UpdateGroup | None = None

    def beside(self, path: str, body: dict[str, object], work: object) -> httpx.Response:
        """Post while ``work`` runs here."""
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(self.client.post(path, json=body)))
        thread.start()
        work()  # type: ignore[operator]
        thread.join(SECONDS)
        return answers[0]

    def join(self) -> httpx.Response:
        body: dict[str, object] = {
            "master_address": "127.0.0.1", "master_port": self.store.port, "rank_offset": 1, "world_size": 2,
            "group_name": self.name, "backend": "gloo",
        }  # fmt: skip

        def open_group() -> None:
            self.group = UpdateGroup(self.store, self.name, 0, 2, "gloo", SECONDS)

        return self.beside("/init_weights_update_group", body, open_group)

    def send(self, tensors: dict[str, torch.Tensor], **more: object) -> httpx.Response:
        group = self.group
        assert group is not None
        return self.beside(
            "/update_weights_from_distributed",
            {**self.body(tensors), **more},
            lambda: [group.broadcast(tensor) for tensor in tensors.values()],
        )

    def body(self, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
        return {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
        }


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server process: two members of one group cannot share a process."""
    folder = tmp_path_factory.mktemp("server")
    supervisor = Supervisor(folder)
    ready = folder / "ready.json"
    command = [
        sys.executable,
        "-m",
        "agentrl.engine",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--threads",
        "1",
    ]
    command += ["--model", str(tiny), "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    url = supervisor.wait_ready(supervisor.start("server", command), ready, SECONDS)["url"]
    with httpx.Client(base_url=url, timeout=SECONDS) as opened:
        yield opened
    supervisor.stop()


@pytest.fixture
def client(server: httpx.Client, tiny: Path) -> httpx.Client:
    """The server with its first weights."""
    server.post("/end_weight_update", json={})
    body = {"model_path": str(tiny), "weight_version": "0"}
    assert server.post("/update_weights_from_disk", json=body).status_code == 200
    return server


def checksums(client: httpx.Client) -> dict[str, str]:
    return client.post("/weights_checker", json={"action": "checksum"}).json()["checksums"]


@pytest.fixture
def sender(client: httpx.Client, request: pytest.FixtureRequest) -> Iterator[Sender]:
    made = Sender(client, request.node.name)
    yield made
    if made.group is not None:
        assert client.post("/destroy_weights_update_group", json={"group_name": made.name}).status_code == 200
        made.group.close()


def test_two_buckets_change_the_weights_and_the_last_one_the_version(sender: Sender, other: Path) -> None:
    assert sender.join().json()["success"]
    assert sender.client.post("/begin_weight_update", json={}).json()["success"]
    tensors = load_file(other / "model.safetensors")
    names = sorted(tensors)
    first, second = ({name: tensors[name] for name in part} for part in (names[:3], names[3:]))
    assert sender.send(first).json()["success"]
    assert sender.client.get("/model_info").json()["weight_version"] == "0"
    assert sender.send(second, weight_version="7").json()["success"]
    assert sender.client.post("/end_weight_update", json={}).json()["success"]
    assert sender.client.get("/model_info").json()["weight_version"] == "7"
    assert checksums(sender.client) == {name: checksum(raw_bytes(tensor)) for name, tensor in tensors.items()}
    name = next(name for name in names if tensors[name].dim() == 2)
    shown = sender.client.post("/get_weights_by_name", json={"name": name, "truncate_size": 2}).json()
    assert torch.equal(torch.tensor(shown), tensors[name][:2])


def test_outside_a_session_without_a_group_and_with_wrong_tensors_nothing_is_waited_for(sender: Sender) -> None:
    client = sender.client
    good = {"model.norm.weight": torch.zeros(32)}

    def refused(body: dict[str, object], text: str) -> None:
        answer = client.post("/update_weights_from_distributed", json=body)
        assert answer.status_code == 400 and text in answer.text, answer.text

    refused(sender.body(good), "call /begin_weight_update first")
    assert client.post("/end_weight_update", json={}).status_code == 400
    assert client.post("/begin_weight_update", json={}).status_code == 200
    assert client.post("/begin_weight_update", json={}).status_code == 400
    refused(sender.body(good), "there is no group")
    assert sender.join().status_code == 200
    refused(sender.body({"no.such": torch.zeros(1)}), "unknown parameter names")
    refused(sender.body({"model.norm.weight": torch.zeros(31)}), "has shape [31] instead of")
    refused({**sender.body(good), "dtypes": ["float8"]}, "float8")
    refused({**sender.body(good), "shapes": []}, "must have the same length")
    assert client.post("/end_weight_update", json={}).status_code == 200


def test_a_sender_that_leaves_in_the_middle_changes_nothing_and_another_group_can_be_made(
    sender: Sender, other: Path
) -> None:
    assert sender.join().status_code == 200
    sender.client.post("/begin_weight_update", json={})
    tensors = load_file(other / "model.safetensors")
    before = checksums(sender.client)
    group = sender.group
    assert group is not None
    first = next(iter(tensors.values()))

    def leave() -> None:
        group.broadcast(first)
        group.close()

    answer = sender.beside("/update_weights_from_distributed", sender.body(tensors), leave)
    assert answer.status_code == 400 and "nothing was changed" in answer.text, answer.text
    assert checksums(sender.client) == before
    sender.name, sender.group, sender.store = f"{sender.name}-again", None, open_store("127.0.0.1", 2, SECONDS)
    assert sender.join().status_code == 200
    assert sender.send(tensors, weight_version="2").status_code == 200
