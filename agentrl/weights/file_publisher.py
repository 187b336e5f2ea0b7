"""Publishes weights by file: gathered parameter by parameter into a safetensors file that servers map.

Guarantees: two buffers take turns, so the last published version stays readable until the one after the next; what is
written has the dtype that the servers hold; the manifest's fingerprints are of the bytes in the file. All ranks call
:meth:`WeightPublisher.write` together. Where all are on one host each writes its own parts; else all parts are gathered
and rank 0 alone writes.
"""

import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.core.weight_manifest import (
    SAMPLED,
    SHM,
    SHM_PREFIX,
    WEIGHTS_FILE,
    TensorSpec,
    WeightManifest,
    fingerprint,
    sweep_stale,
)
from agentrl.weights.file_names import FileWeight
from agentrl.weights.gather import Weight, full_tensor
from agentrl.weights.own_parts import seen_by_all, write_parts
from agentrl.weights.safetensors_files import DTYPE_NAMES, safetensors_header
from agentrl.weights.transport import require_room

Offer = Callable[[WeightManifest], None]  # tells the controller of a version; returns when the servers serve it
SAMPLED_PARAMETERS = 4


class Publisher(Protocol):
    """Interface that the trainer publishes weights through."""

    @property
    def unchanged(self) -> float | None:
        """Share of the trained tensors of the latest version that are the same as before, where that is known."""
        ...

    def publish(self, version: int, offer: Offer) -> None:
        """Bring a version to the servers; a collective, ``offer`` is called on rank 0."""
        ...

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters, one at a time; a collective."""
        ...

    def close(self) -> None:
        """Remove what was left."""
        ...


class WeightPublisher:
    """Writes published versions for the servers of this host, or of any host that sees ``disk_dir``.

    Args:
        parameters: Hugging Face name -> parameter (DTensor or plain) or what a trained adapter makes of it, tied copies
            left out.
        dtype: Element type to write.
        transport: Shared memory or ``disk_dir``.
        disk_dir: Folder for ``disk``.
        is_writer: Whether this rank writes.
        file: Name of the file in its folder.
        tensor: Place of this rank in its tensor group, and that group's size, where each rank may write its own parts
            of the parameters; ``None``: rank 0 writes.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Weight]],
        dtype: torch.dtype,
        transport: Literal["shm", "disk"],
        disk_dir: Path,
        *,
        is_writer: bool,
        file: str = WEIGHTS_FILE,
        tensor: tuple[int, int] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self.dtype = dtype
        self.specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in self._parameters]
        self._is_writer = is_writer
        self._file = file
        self._tensor = tensor if tensor is not None and dist.get_world_size() > 1 else None
        self._latest: dict[str, str] = {}  # fingerprints
        self.unchanged: float | None = None
        itemsize = torch.empty((), dtype=dtype).element_size()
        self._nbytes = sum(p.shape.numel() for _, p in self._parameters) * itemsize
        asked = [n for n, p in self._parameters if len(p.shape) == 2 and not isinstance(p, FileWeight)]
        self._sampled = spread(asked, SAMPLED_PARAMETERS)  # servers cannot be asked for one expert of many
        self._folder: Path | None = None
        self._buffers: list[tuple[Path, mmap.mmap, int]] = []
        self.transport: Literal["shm", "disk"] = transport
        if is_writer:
            sweep_stale()
            if transport == "shm":
                require_room(self._nbytes)
            base = SHM if self.transport == "shm" else disk_dir
            base.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{SHM_PREFIX}{os.getpid()}-", dir=base))
            self._folder.chmod(0o700)
        if self._tensor is not None:
            self._share_folder()

    def _share_folder(self) -> None:
        """Tells all ranks rank 0's folder, if they are all on its host; a collective.

        On a shared disk another host's cache may hold a buffer's older bytes, of which fingerprints would be wrong.
        """
        found: list[str] = [str(self._folder or ""), socket.gethostname()]
        dist.broadcast_object_list(found, src=0)
        self._shared = Path(found[0])
        if not seen_by_all(self._shared if found[1] == socket.gethostname() else None):
            self._tensor = None

    def publish(self, version: int, offer: Offer) -> None:
        """Write a version and offer it; a collective, ``offer`` is called on the writing rank."""
        manifest = self.write(version)
        if manifest is not None:
            offer(manifest)

    def write(self, version: int) -> WeightManifest | None:
        """Write or gather all parameters; on rank 0 the next buffer then has them, and its manifest is returned."""
        if not self._is_writer:
            if self._tensor is not None:
                self._write_own(version % 2)
            else:
                for _, parameter in self._parameters:
                    full_tensor(parameter)
            return None
        path, buffer, data_start = self._buffer(version % 2)
        if self._tensor is not None:
            self._write_own(version % 2)
        view = memoryview(buffer)
        fingerprints: dict[str, str] = {}
        samples: dict[str, list[float]] = {}
        offset = data_start
        for name, parameter in self._parameters:
            count = parameter.shape.numel()
            nbytes = count * torch.empty((), dtype=self.dtype).element_size()
            target = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=offset).view(parameter.shape)
            if self._tensor is None:
                target.copy_(full_tensor(parameter))
            fingerprints[name] = fingerprint(view[offset : offset + nbytes])
            if name in self._sampled:
                samples[name] = _first_values(target)
            offset += nbytes
        trained = [name for name, parameter in self._parameters if parameter.requires_grad]
        same = sum(self._latest.get(name) == fingerprints[name] for name in trained)
        self.unchanged = same / len(trained) if self._latest and trained else None
        self._latest = fingerprints
        return self.manifest(
            version, self.transport, path=str(path.resolve()), fingerprints=fingerprints, samples=samples
        )

    def _write_own(self, index: int) -> None:
        """Writes this rank's parts into a buffer that rank 0 made; a collective."""
        assert self._tensor is not None
        dist.barrier()
        start = len(safetensors_header([(n, p.shape) for n, p in self._parameters], self.dtype))
        path = self._shared / f"buffer-{index}" / self._file
        itemsize = torch.empty((), dtype=self.dtype).element_size()
        files: list[tuple[Path, int, Weight]] = []
        for _, parameter in self._parameters:
            files.append((path, start, parameter))
            start += parameter.shape.numel() * itemsize
        write_parts(files, self.dtype, tensor=self._tensor)
        dist.barrier()

    def manifest(self, version: int, transport: Literal["shm", "disk", "broadcast"], **more: Any) -> WeightManifest:
        """The manifest of a version; ``more`` depends on the transport."""
        return WeightManifest(
            version=version,
            transport=transport,
            dtype=DTYPE_NAMES[self.dtype],
            nbytes=self._nbytes,
            **{"fingerprints": {}, **more},
        )

    def samples(self) -> dict[str, list[float]]:
        """The first values of some parameters, as servers will hold them; a collective."""
        chosen = [(name, parameter) for name, parameter in self._parameters if name in self._sampled]
        return {name: _first_values(full_tensor(parameter).to(self.dtype)) for name, parameter in chosen}

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters, one at a time; a collective over all ranks."""
        for name, parameter in self._parameters:
            yield name, full_tensor(parameter)

    def _buffer(self, index: int) -> tuple[Path, mmap.mmap, int]:
        while len(self._buffers) <= index:
            assert self._folder is not None
            folder = self._folder / f"buffer-{len(self._buffers)}"
            folder.mkdir()
            header = safetensors_header([(n, p.shape) for n, p in self._parameters], self.dtype)
            with open(folder / self._file, "w+b") as file:
                os.posix_fallocate(
                    file.fileno(), 0, len(header) + self._nbytes
                )  # a full disk shows here, not as SIGBUS
                file.write(header)
                file.flush()
                buffer = mmap.mmap(file.fileno(), len(header) + self._nbytes)
            self._buffers.append((folder, buffer, len(header)))
        return self._buffers[index]

    def close(self) -> None:
        """Remove what was written."""
        self._buffers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def spread(names: list[str], count: int) -> frozenset[str]:
    """``count`` of ``names``, evenly from the first to the last but one, or all of them."""
    return frozenset(names[index * len(names) // count] for index in range(count)) if names else frozenset()


def _first_values(matrix: Tensor) -> list[float]:
    """The beginning of its first row."""
    return matrix.view(-1)[: min(SAMPLED, matrix.shape[-1])].tolist()
