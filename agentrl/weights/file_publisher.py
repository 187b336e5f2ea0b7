"""Publishes weights by file: a safetensors file that servers map.

Guarantees: two buffers take turns, so the last published version stays readable until the one after the next; what is
written has the dtype that the servers hold; the manifest's fingerprints are of the bytes in the file. All ranks call
:meth:`WeightPublisher.write` together. Where all of them see the file each writes its own parts; else each weight is
gathered and rank 0 alone writes. On a disk each version is a new file, closed before it is offered: hosts that share
the disk then read what was written, and not what they remember of the version before.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
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
from agentrl.weights.part_prints import PartPrints
from agentrl.weights.safetensors_files import DTYPE_NAMES, safetensors_header
from agentrl.weights.transport import BUFFERS, require_room

Offer = Callable[[WeightManifest], None]  # tells the controller of a version; returns when the servers serve it
SAMPLED_PARAMETERS = 4
BESIDE = "untrained.safetensors"  # file of tensors that are the same in all versions


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
        beside: Tensors that stay as they are, of any type, for a file beside each version's; they have no fingerprints.
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
        beside: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self.dtype = dtype
        self.specs = [TensorSpec(name=name, shape=tuple(p.shape)) for name, p in self._parameters]
        self._is_writer = is_writer
        self._file = file
        self._beside = dict(beside or {})
        self._tensor = tensor if tensor is not None and dist.get_world_size() > 1 else None
        self._latest: dict[str, str] = {}  # fingerprints
        self.unchanged: float | None = None
        self._itemsize = torch.empty((), dtype=dtype).element_size()
        self._sizes = [p.shape.numel() * self._itemsize for _, p in self._parameters]
        self._nbytes = sum(self._sizes)
        self._header = safetensors_header([(n, p.shape) for n, p in self._parameters], dtype)
        asked = [n for n, p in self._parameters if len(p.shape) == 2 and not isinstance(p, FileWeight)]
        self._sampled = spread(asked, SAMPLED_PARAMETERS)  # servers cannot be asked for one expert of many
        self._folder: Path | None = None
        self._buffers: dict[int, mmap.mmap] = {}
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
        """Tells all ranks rank 0's folder, if they all see it; a collective."""
        found: list[str] = [str(self._folder or "")]
        dist.broadcast_object_list(found, src=0)
        self._shared = Path(found[0])
        if not seen_by_all(self._shared):
            self._tensor = None

    def publish(self, version: int, offer: Offer) -> None:
        """Write a version and offer it; a collective, ``offer`` is called on the writing rank."""
        manifest = self.write(version)
        if manifest is not None:
            offer(manifest)

    def write(self, version: int) -> WeightManifest | None:
        """Write or gather all parameters; rank 0 gets the manifest of what then stands in the next buffer."""
        index = version % BUFFERS
        if self._tensor is None and not self._is_writer:
            for _, parameter in self._parameters:
                full_tensor(parameter)
            return None
        fingerprints, samples = self._write_own(index) if self._tensor is not None else self._write_whole(index)
        if not self._is_writer:
            return None
        trained = [name for name, parameter in self._parameters if parameter.requires_grad]
        same = sum(self._latest.get(name) == fingerprints[name] for name in trained)
        self.unchanged = same / len(trained) if self._latest and trained else None
        self._latest = fingerprints
        path = str(self._path(index).parent.resolve())
        return self.manifest(version, self.transport, path=path, fingerprints=fingerprints, samples=samples)

    def _write_own(self, index: int) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Writes this rank's parts into a file that rank 0 made; a collective.

        Returns:
            Fingerprints and samples of the whole tensors, by name.
        """
        assert self._tensor is not None
        if self._is_writer:
            self._make_file(index).close()
        dist.barrier()
        start, files = len(self._header), []
        for (_, parameter), size in zip(self._parameters, self._sizes, strict=True):
            files.append((self._path(index), start, parameter))
            start += size
        heads = {
            number: min(SAMPLED, parameter.shape[-1]) * self._itemsize
            for number, (name, parameter) in enumerate(self._parameters)
            if name in self._sampled
        }
        written = PartPrints(self._sizes, heads)
        write_parts(files, self.dtype, tensor=self._tensor, prints=written)
        prints, first = written.gathered()  # ends when all ranks have written
        names = [name for name, _ in self._parameters]
        samples = {names[at]: torch.frombuffer(bytearray(one), dtype=self.dtype).tolist() for at, one in first.items()}
        return dict(zip(names, prints, strict=True)), samples

    def _write_whole(self, index: int) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Gathers all parameters into a file; see :meth:`_write_own`."""
        buffer = self._buffers.get(index)
        made = None
        if buffer is None:
            made = self._make_file(index)
            buffer = mmap.mmap(made.fileno(), len(self._header) + self._nbytes)
        view, offset = memoryview(buffer), len(self._header)
        fingerprints: dict[str, str] = {}
        samples: dict[str, list[float]] = {}
        for (name, parameter), size in zip(self._parameters, self._sizes, strict=True):
            count = parameter.shape.numel()
            target = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=offset).view(parameter.shape)
            target.copy_(full_tensor(parameter))
            fingerprints[name] = fingerprint(view[offset : offset + size])
            if name in self._sampled:
                samples[name] = _first_values(target)
            offset += size
        if made is not None:
            made.close()  # on a network's disk this is when other hosts can read it
        if self.transport == "shm":
            self._buffers[index] = buffer
        return fingerprints, samples

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

    def _path(self, index: int) -> Path:
        """Returns the file of a buffer."""
        folder = self._folder if self._folder is not None else self._shared
        return folder / f"buffer-{index}" / self._file

    def _make_file(self, index: int) -> BinaryIO:
        """Returns a buffer's file, opened; in shared memory it is that of the version before, whose room it keeps."""
        path = self._path(index)
        path.parent.mkdir(exist_ok=True)
        if self._beside and not (other := path.with_name(BESIDE)).exists():
            save_file(self._beside, other, metadata={"format": "pt"})
        if self.transport == "disk":
            path.unlink(missing_ok=True)
        elif path.is_file():
            return open(path, "r+b")
        file = open(path, "w+b")  # noqa: SIM115  the caller closes it
        os.posix_fallocate(file.fileno(), 0, len(self._header) + self._nbytes)  # a full disk shows here, not as SIGBUS
        file.write(self._header)
        file.flush()
        return file

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
