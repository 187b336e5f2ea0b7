"""Broadcast weights on the trainer's side: who is in the group, parts, and the way by file when it fails."""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.core.weight_manifest import TensorSpec, WeightManifest
from agentrl.train.controller_client import ControllerError
from agentrl.weights import broadcast_publisher as broadcast
from agentrl.weights.broadcast_publisher import BroadcastPublisher, Sender, buckets, reachable_host
from agentrl.weights.file_publisher import WeightPublisher

CPU = torch.device("cpu")


class Group:
    """Stands in for the process group: remembers what was sent."""

    made: list["Group"]

    def __init__(self, *_: object) -> None:
        self.sent: list[torch.Tensor] = []
        self.closed = False
        self.fails = False
        Group.made.append(self)

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.fails:
            raise RuntimeError("connection closed by peer")
        self.sent.append(tensor.clone())

    def close(self) -> None:
        self.closed = True


class Members:
    """The controller's answer."""

    def __init__(self) -> None:
        self.ranks = {"http://127.0.0.1:1": 1, "http://127.0.0.1:2": 2}
        self.by_file = False
        self.broken = False

    def members(self) -> dict[str, Any]:
        if self.broken:
            raise ControllerError("a server does not answer")
        return {"ranks": dict(self.ranks), "by_file": self.by_file}


class Run:
    """A publisher of two parameters, and what it offered."""

    def __init__(self, folder: Path) -> None:
        self.parameters = {"a": torch.nn.Parameter(torch.randn(3, 4)), "b": torch.nn.Parameter(torch.randn(5))}
        self.files = WeightPublisher(self.parameters.items(), torch.bfloat16, "disk", folder, is_writer=True)
        self.members = Members()
        self.publisher = BroadcastPublisher(self.files, self.members, CPU, 5.0)
        self.offers: list[WeightManifest] = []
        self.refuse = False

    def offer(self, manifest: WeightManifest) -> None:
        self.offers.append(manifest)
        if self.refuse and manifest.transport == "broadcast":
            raise ControllerError("a server refused")


@pytest.fixture
def run(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    Group.made = []
    monkeypatch.setattr(broadcast, "UpdateGroup", Group)
    return Run(tmp_path)


def test_all_parameters_are_sent_in_order_in_the_servers_dtype(run: Run) -> None:
    run.publisher.publish(1, run.offer)
    (manifest,), (group,) = run.offers, Group.made
    plan = manifest.broadcast
    assert plan is not None and manifest.transport == "broadcast" and manifest.path == ""
    assert [spec.name for bucket in plan.buckets for spec in bucket] == ["a", "b"]
    for sent, parameter in zip(group.sent, run.parameters.values(), strict=True):
        assert torch.equal(sent, parameter.detach().to(torch.bfloat16))
    assert (plan.world_size, plan.offsets) == (4, {"http://127.0.0.1:1": 1, "http://127.0.0.1:2": 2})
    assert manifest.samples == {"a": run.parameters["a"].detach().to(torch.bfloat16).view(-1)[:4].tolist()}
    assert list(run.files._buffers) == [], "a file was written as well"


def test_a_group_serves_many_versions_and_is_made_anew_when_the_servers_change(run: Run) -> None:
    run.publisher.publish(1, run.offer)
    run.publisher.publish(2, run.offer)
    assert len(Group.made) == 1
    assert [offer.broadcast.join for offer in run.offers if offer.broadcast] == [True, False]
    del run.members.ranks["http://127.0.0.1:1"]
    run.publisher.publish(3, run.offer)
    assert len(Group.made) == 2 and Group.made[0].closed
    plan = run.offers[-1].broadcast
    assert plan is not None and plan.join and plan.offsets == {"http://127.0.0.1:2": 1}
    first = run.offers[0].broadcast
    assert first is not None and plan.leave == first.group and first.leave == ""


def test_a_version_that_a_joining_server_waits_for_goes_by_file(run: Run) -> None:
    run.members.by_file = True
    run.publisher.publish(1, run.offer)
    assert [offer.transport for offer in run.offers] == ["disk"] and Group.made == []


def test_without_an_answer_about_the_servers_a_version_goes_by_file(run: Run) -> None:
    run.members.broken = True
    run.publisher.publish(1, run.offer)
    assert [offer.transport for offer in run.offers] == ["disk"]


def test_a_refused_broadcast_goes_by_file_and_the_next_one_in_a_new_group(run: Run) -> None:
    run.refuse = True
    run.publisher.publish(1, run.offer)
    assert [offer.transport for offer in run.offers] == ["broadcast", "disk"]
    assert Group.made[0].closed
    run.refuse = False
    run.publisher.publish(2, run.offer)
    assert len(Group.made) == 2 and run.offers[-1].transport == "broadcast"


def test_a_broken_connection_goes_by_file(run: Run) -> None:
    run.publisher.publish(1, run.offer)
    Group.made[0].fails = True
    run.publisher.publish(2, run.offer)
    assert [(offer.version, offer.transport) for offer in run.offers] == [
        (1, "broadcast"), (2, "broadcast"), (2, "disk"),
    ]  # fmt: skip


def test_parts_hold_what_fits_and_a_tensor_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 40)
    specs = [TensorSpec(name=str(size), shape=(size,)) for size in (4, 5, 2, 30, 1, 9)]
    parts = [[spec.name for spec in part] for part in buckets(specs, torch.float32)]
    assert parts == [["4", "5"], ["2"], ["30"], ["1", "9"]]


def test_servers_elsewhere_are_told_the_address_that_leads_to_them() -> None:
    assert reachable_host(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
    own = [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET]
    assert own
    for address in own:
        assert reachable_host(["http://localhost:1", f"http://{address}:2"]) == address


def test_two_senders_have_groups_of_different_names() -> None:
    ranks = {"http://127.0.0.1:1": 1}
    first, second = (Sender(ranks, "gloo", 5.0).plan(()) for _ in range(2))
    assert first.group != second.group and first.port != second.port
