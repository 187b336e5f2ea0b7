"""The manifest of a weight push, and the fingerprints that show whether a server has loaded the weights.

Guarantees: a manifest is plain data (JSON); the weights are in separate safetensors files, on tmpfs or on disk.
Fingerprints depend only on the bytes, so trainer and server need no common code for tensors.
"""

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

WINDOW = 16 * 1024  # bytes read at the head, the middle and the tail of a tensor: 13 MB for a model of 272 tensors
SAMPLED = 8  # values per parameter in a manifest
WEIGHTS_FILE = "model.safetensors"
SHM = Path("/dev/shm")
SHM_PREFIX = "agentrl-weights-"  # followed by the owner's process id


class TensorSpec(BaseModel):
    """Hugging Face name and shape of a tensor to broadcast."""

    model_config = ConfigDict(frozen=True)

    name: str
    shape: tuple[int, ...]


class BroadcastPlan(BaseModel):
    """Plan of a weight broadcast to the servers through a process group (:mod:`agentrl.weights.update_group`).

    Attributes:
        group: Name of the group.
        address: Host on which the sender's store listens.
        port: TCP port of the sender's store.
        backend: ``gloo`` or ``nccl``.
        world_size: Number of ranks of the group: the sender, then the ranks of each server.
        offsets: URL of a server -> first rank of the server in the group.
        join: Whether the servers have to join first.
        leave: Name of an earlier group that the servers may still be in.
        buckets: Tensors in sending order; a server receives one bucket at a time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: str
    address: str
    port: int
    backend: Literal["gloo", "nccl"]
    world_size: int
    offsets: dict[str, int]
    join: bool
    leave: str = ""
    buckets: tuple[tuple[TensorSpec, ...], ...]


class WeightManifest(BaseModel):
    """Manifest of a published policy version.

    Attributes:
        version: Policy version, which is the number of trainer steps done.
        transport: ``shm`` for a tmpfs folder of this host, ``disk`` for any other folder, ``broadcast`` for no folder.
        path: Folder that holds ``model.safetensors``, readable by the servers; empty with ``broadcast``.
        dtype: Element type of every tensor, by its safetensors name (``F32``, ``BF16``, ``F16``).
        nbytes: Total size of the tensors in bytes.
        fingerprints: Hugging Face parameter name -> :func:`fingerprint` of its bytes. Tied copies are left out; empty
            with ``broadcast``.
        samples: Hugging Face parameter name -> first :data:`SAMPLED` values of some parameters, for servers that can
            return values but no fingerprints.
        broadcast: Plan of the broadcast; ``None`` with any other transport.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    transport: Literal["shm", "disk", "broadcast"]
    path: str = ""
    dtype: str
    nbytes: int
    fingerprints: dict[str, str]
    samples: dict[str, list[float]] = {}
    broadcast: BroadcastPlan | None = None

    @property
    def file(self) -> Path:
        """Path of the safetensors file."""
        return Path(self.path) / WEIGHTS_FILE


def fingerprint(data: memoryview) -> str:
    """Computes a tensor's fingerprint: its length in bytes and a CRC-32 over three windows (head, middle, tail)."""
    data = data.cast("B")
    crc = 0
    for start, end in windows(len(data)):
        crc = zlib.crc32(data[start:end], crc)
    return f"{len(data):x}:{crc:08x}"


def windows(size: int) -> list[tuple[int, int]]:
    """Returns the ranges of bytes of a tensor of ``size`` bytes that its fingerprint reads; small ones overlap."""
    starts = sorted({0, max(0, size // 2 - WINDOW // 2), max(0, size - WINDOW)})
    return [(start, min(size, start + WINDOW)) for start in starts]


def checksum(data: memoryview) -> str:
    """Computes a tensor's length in bytes and the CRC-32 over all of them."""
    data = data.cast("B")
    return f"{len(data):x}:{zlib.crc32(data):08x}"


def mismatches(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Returns the names whose fingerprint in ``actual`` differs or is missing, sorted."""
    return sorted(name for name, value in expected.items() if actual.get(name) != value)


def sweep_stale(folder: Path = SHM) -> None:
    """Removes published weights in shared memory whose owner process no longer runs, e.g. after ``kill -9``."""
    for found in folder.glob(f"{SHM_PREFIX}*") if folder.is_dir() else ():
        owner = found.name.removeprefix(SHM_PREFIX).split("-")[0]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(found, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True
