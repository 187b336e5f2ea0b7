"""Publishes weights by file: gathered parameter by parameter into a safetensors file that servers map.

Guarantees: two buffers take turns, so the last published version stays readable until the one after the next; what is
written has the dtype that the servers hold; the manifest's fingerprints are of the bytes in the file. All ranks call
:meth:`WeightPublisher.write` together (gathering is a collective); rank 0 alone writes.
"""

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
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
from agentrl.weights.gather import Weight, full_tensor
from agentrl.weights.transport import require_room

Offer = Callable[[WeightManifest], None]  # tells the controller of a version; returns when the servers serve it
SAMPLED_PARAMETERS = 4
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names


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
    ) -> None:
        self._parameters = list(parameters)
        self.dtype = dtype
        self.specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in self._parameters]
        self._is_writer = is_writer
        self._file = file
        self._latest: dict[str, str] = {}  # fingerprints
        self.unchanged: float | None = None
        itemsize = torch.empty((), dtype=dtype).element_size()
        self._nbytes = sum(p.shape.numel() for _, p in self._parameters) * itemsize
        self._sampled = spread([n for n, p in self._parameters if len(p.shape) == 2], SAMPLED_PARAMETERS)
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

    def publish(self, version: int, offer: Offer) -> None:
        """Write a version and offer it; a collective, ``offer`` is called on the writing rank."""
        manifest = self.write(version)
        if manifest is not None:
            offer(manifest)

    def write(self, version: int) -> WeightManifest | None:
        """Gather all parameters; on the writing rank fill the next buffer and return its manifest."""
        if not self._is_writer:
            for _, parameter in self._parameters:
                full_tensor(parameter)
            return None
        path, buffer, data_start = self._buffer(version % 2)
        view = memoryview(buffer)
        fingerprints: dict[str, str] = {}
        samples: dict[str, list[float]] = {}
        offset = data_start
        for name, parameter in self._parameters:
            full = full_tensor(parameter)
            nbytes = full.numel() * torch.empty((), dtype=self.dtype).element_size()
            target = torch.frombuffer(buffer, dtype=self.dtype, count=full.numel(), offset=offset).view(full.shape)
            target.copy_(full)
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


def safetensors_header(shapes: Iterable[tuple[str, torch.Size]], dtype: torch.dtype) -> bytes:
    """Header of a safetensors file that holds these tensors one after the other (format: 8-byte size, JSON, data)."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes:
        end = offset + shape.numel() * itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _first_values(matrix: Tensor) -> list[float]:
    """The beginning of its first row."""
    return matrix.view(-1)[: min(SAMPLED, matrix.shape[-1])].tolist()
