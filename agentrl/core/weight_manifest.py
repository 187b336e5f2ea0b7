"""The manifest of a weight push, and the checksums by which a server proves that it has loaded the weights.

Guarantees: a manifest is plain data (JSON); the bytes it speaks of travel beside it as safetensors files, on tmpfs or
on disk. Fingerprints are computed from the bytes alone, so trainer and server agree without sharing code for tensors.
"""

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

WINDOW = 16 * 1024  # bytes read at the head, the middle and the tail of a tensor: 13 MB for a model of 272 tensors
SAMPLED = 8  # values of a parameter that a manifest shows
WEIGHTS_FILE = "model.safetensors"
SHM = Path("/dev/shm")
SHM_PREFIX = "agentrl-weights-"  # followed by the owner's process id


class TensorSpec(BaseModel):
    """A tensor that is going to be broadcast: its Hugging Face name and its shape."""

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
        world_size: Ranks of the group: the sender, then those of each server.
        offsets: URL of a server -> its first rank in the group.
        join: Whether the servers have to join first.
        leave: Name of an earlier group that they may still be in.
        buckets: Tensors in the order in which they are sent; a server takes one bucket at a time.
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
    """One published policy version.

    Attributes:
        version: Policy version the bytes belong to (trainer steps done).
        transport: ``shm`` for a tmpfs folder of this host, ``disk`` for any other folder, ``broadcast`` for no folder.
        path: Folder that holds ``model.safetensors``, readable by the servers; empty with ``broadcast``.
        dtype: Element type of every tensor, by its safetensors name (``F32``, ``BF16``, ``F16``).
        nbytes: Total size of the tensors in bytes.
        fingerprints: Hugging Face parameter name -> :func:`fingerprint` of its bytes. Tied copies are left out; none
            with ``broadcast``.
        samples: Hugging Face parameter name -> its first :data:`SAMPLED` values, of some parameters; for servers that
            can show values and no fingerprints.
        broadcast: Exactly with ``broadcast``.
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
        """The safetensors file itself."""
        return Path(self.path) / WEIGHTS_FILE


def fingerprint(data: memoryview) -> str:
    """Fingerprint of one tensor's bytes: its length and a CRC-32 over three windows (head, middle, tail)."""
    data = data.cast("B")
    size = len(data)
    crc = 0
    for start in sorted({0, max(0, size // 2 - WINDOW // 2), max(0, size - WINDOW)}):
        crc = zlib.crc32(data[start : start + WINDOW], crc)
    return f"{size:x}:{crc:08x}"


def checksum(data: memoryview) -> str:
    """CRC-32 over all bytes of one tensor."""
    data = data.cast("B")
    return f"{len(data):x}:{zlib.crc32(data):08x}"


def mismatches(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Names whose fingerprint differs or is missing on the server's side, sorted."""
    return sorted(name for name, value in expected.items() if actual.get(name) != value)


def sweep_stale(folder: Path = SHM) -> None:
    """Remove published weights whose owner is gone: what ``kill -9`` leaves in shared memory."""
    for found in folder.glob(f"{SHM_PREFIX}*") if folder.is_dir() else ():
        owner = found.name.removeprefix(SHM_PREFIX).split("-")[0]
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(found, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process
        return True
    return True
