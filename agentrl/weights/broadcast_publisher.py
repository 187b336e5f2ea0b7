"""Publishes weights through a process group: no file, no shared disk, the servers anywhere.

Guarantees: a version that cannot be broadcast is written to a file instead, and so is one that a joining server waits
for; all ranks take the same way. The group is made anew when the set of servers changes. Gathering is a collective over
the trainer's ranks; rank 0 alone belongs to the group.
"""

import itertools
import logging
import math
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agentrl.core.weight_manifest import BroadcastPlan, TensorSpec
from agentrl.weights.collectives import shared_decision
from agentrl.weights.file_publisher import Offer, WeightPublisher
from agentrl.weights.transport import LOOPBACK
from agentrl.weights.update_group import UpdateGroup, open_store

BUCKET_BYTES = 512 * 1024 * 1024  # what a server holds beside its own weights while it takes them
log = logging.getLogger(__name__)


class Members(Protocol):
    """Source of the servers that take part, for rank 0."""

    def members(self) -> dict[str, Any]:
        """``ranks``: URL of a server -> its ranks; ``by_file``: whether a file is wanted."""
        ...


class Sender:
    """Rank 0's end of a group with the servers of ``ranks``; they join while :meth:`connect` runs.

    Args:
        ranks: URL of a server -> its ranks.
        backend: ``gloo`` or ``nccl``.
        seconds: Longest time that a server may be waited for.
        left: A group that the servers may leave when they join this one.
    """

    _numbers = itertools.count()

    def __init__(self, ranks: dict[str, int], backend: Literal["gloo", "nccl"], seconds: float, left: str = "") -> None:
        self.ranks = ranks
        self._left = left
        self._seconds = seconds
        self._backend: Literal["gloo", "nccl"] = backend
        self.name = f"agentrl-{os.getpid()}-{next(self._numbers)}"
        self._size = 1 + sum(ranks.values())
        self._host = reachable_host(list(ranks))
        self._store = open_store(self._host, self._size, seconds)
        self._group: UpdateGroup | None = None

    def plan(self, buckets: tuple[tuple[TensorSpec, ...], ...]) -> BroadcastPlan:
        """The plan that the controller and the servers get."""
        starts = itertools.accumulate(self.ranks.values(), initial=1)
        return BroadcastPlan(
            group=self.name,
            address=self._host,
            port=self._store.port,
            backend=self._backend,
            world_size=self._size,
            offsets=dict(zip(self.ranks, starts, strict=False)),
            join=self._group is None,
            leave=self._left if self._group is None else "",
            buckets=buckets,
        )

    def connect(self) -> UpdateGroup:
        """The group, made the first time.

        Raises:
            RuntimeError: Not all servers joined in time.
        """
        if self._group is None:
            self._group = UpdateGroup(self._store, self.name, 0, self._size, self._backend, self._seconds)
        return self._group

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


class BroadcastPublisher:
    """Publishes through a process group.

    Args:
        files: Publishes in files, when a broadcast will not do.
        members: On rank 0, ``None`` on the others.
        device: Device that the tensors are sent from: over NCCL from CUDA, over gloo from elsewhere.
        seconds: Longest time that a server may be waited for.
    """

    def __init__(self, files: WeightPublisher, members: Members | None, device: torch.device, seconds: float) -> None:
        self._files = files
        self._members = members
        self._device = device
        self._seconds = seconds
        self._sender: Sender | None = None
        self._left = ""

    @property
    def unchanged(self) -> float | None:
        """Share of unchanged tensors; known only for versions written to files."""
        return self._files.unchanged

    def publish(self, version: int, offer: Offer) -> None:
        """Broadcast a version, or write it; a collective. ``offer`` is called on rank 0."""
        ranks = self._ranks()
        if shared_decision(bool(ranks), self._device):
            samples = self._files.samples()
            if self._members is None:
                sent = True
                for _ in self._files.gather():  # what rank 0 sends
                    pass
            else:
                sent = self._send(version, ranks, samples, offer)
            if shared_decision(sent, self._device):
                return
        self._files.publish(version, offer)

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`WeightPublisher.gather`."""
        return self._files.gather()

    def close(self) -> None:
        """Leave the group and remove files."""
        self._leave()
        self._files.close()

    def _ranks(self) -> dict[str, int]:
        """On rank 0 the servers to send to; none where a file is wanted, or on other ranks."""
        if self._members is None:
            return {}
        try:
            members = self._members.members()
        except RuntimeError as error:
            log.warning("the servers are not known, the next version goes by file: %s", error)
            return {}
        return {} if members["by_file"] else members["ranks"]

    def _send(self, version: int, ranks: dict[str, int], samples: dict[str, list[float]], offer: Offer) -> bool:
        """Broadcast while the controller has the servers receive; whether all went well."""
        tensors = self._files.gather()
        try:
            if self._sender is None or self._sender.ranks != ranks:
                left = self._leave()
                self._sender = Sender(ranks, "nccl" if self._device.type == "cuda" else "gloo", self._seconds, left)
            plan = self._sender.plan(buckets(self._files.specs, self._files.dtype))
            manifest = self._files.manifest(version, "broadcast", samples=samples, broadcast=plan)
            with ThreadPoolExecutor(1, "offer") as pool:
                offered = pool.submit(offer, manifest)
                try:
                    group = self._sender.connect()
                    for _, full in tensors:
                        group.broadcast(full.to(dtype=self._files.dtype, device=self._device).contiguous())
                except RuntimeError:
                    self._leave()  # servers that still wait for the rest get an error now, and so does the offer
                    raise
                offered.result()
        except RuntimeError as error:
            log.warning("version %d could not be broadcast and goes by file: %s", version, error)
            self._leave()
            for _ in tensors:  # the other ranks take part to the end
                pass
            return False
        return True

    def _leave(self) -> str:
        """Leave the group; the name of the latest one that servers may still be in."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
            self._left = sender.name
        return self._left


def buckets(specs: list[TensorSpec], dtype: torch.dtype) -> tuple[tuple[TensorSpec, ...], ...]:
    """Cut the parameters, in order, into parts of :data:`BUCKET_BYTES` at most; a larger one is a part of its own."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    parts: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        nbytes = math.prod(spec.shape) * itemsize
        if not parts or nbytes > room:
            parts.append([])
            room = BUCKET_BYTES
        parts[-1].append(spec)
        room -= nbytes
    return tuple(tuple(part) for part in parts)


def reachable_host(urls: list[str]) -> str:
    """Address of this host for the servers: the one that this host reaches the first of them with.

    Servers of which some stand here, named by a loopback address, and others elsewhere, get that of the others.
    """
    hosts = [str(urlsplit(url).hostname) for url in urls]
    apart = [host for host in hosts if host not in LOOPBACK]
    if not apart:
        return LOOPBACK[0]
    found = socket.getaddrinfo(apart[0], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])  # sends nothing
        return str(probe.getsockname()[0])
