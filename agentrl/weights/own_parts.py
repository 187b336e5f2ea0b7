"""Writes each rank's own parts of sharded weights into files that hold them whole; nothing is gathered.

Guarantees: the bytes are those of the gathered weights; a part that several ranks hold is written by one of them, and
these take turns from weight to weight; what no rank can write by itself is gathered by all and written by one.
"""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from agentrl.weights.file_cuts import Intervals
from agentrl.weights.file_names import FileWeight
from agentrl.weights.gather import MergedWeight, Weight, full_tensor, own_part
from agentrl.weights.part_prints import PartPrints

SPLIT = ("tp", "ep")  # names of mesh dimensions whose ranks hold other parts of a matrix, or other experts


def write_parts(
    files: Sequence[tuple[Path, int, Weight]],
    dtype: torch.dtype,
    *,
    tensor: tuple[int, int],
    prints: PartPrints | None = None,
) -> None:
    """Writes this rank's parts; a collective where a weight is merged or must be gathered.

    Args:
        files: File, offset in bytes and weight, in the same order on all ranks; the files are as large as they will be.
        dtype: Element type to write.
        tensor: Place of this rank in its tensor group, and that group's size.
        prints: Counts what is written, by the number of a weight.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    opened: dict[Path, int] = {}
    try:
        for number, (path, offset, weight) in enumerate(files):
            if path not in opened:
                opened[path] = os.open(path, os.O_WRONLY)
            for place, part in _parts(weight, number, tensor):
                data: Any = part.to(dtype=dtype, device="cpu").contiguous().view(-1).view(torch.uint8).numpy()
                _write(opened[path], memoryview(data), offset + place * itemsize)
                if prints is not None:
                    prints.add(number, place * itemsize, memoryview(data))
    finally:
        for handle in opened.values():
            os.close(handle)


def seen_by_all(path: Path | None) -> bool:
    """Whether all ranks see a folder or file that rank 0 made; a collective."""
    seen = torch.tensor(int(path is not None and path.exists()))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen)


def _write(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _parts(weight: Weight, number: int, tensor: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
    """Yields what this rank writes of a weight: the place of its first element in the whole one, and the elements."""
    cut = weight.cut if isinstance(weight, FileWeight) else None
    base: Any = weight.base if isinstance(weight, MergedWeight) else weight if cut is None else cut.weight
    found = intervals(base) if isinstance(base, DTensor) else None
    if found is None:
        whole = full_tensor(weight)
        if number % dist.get_world_size() == dist.get_rank():
            yield 0, whole
        return
    local: Tensor = base.detach().to_local()  # type: ignore[attr-defined]
    if isinstance(weight, MergedWeight):
        local = _merged(weight, local, found)
    copy, copies = _copy(base, tensor)
    if number % copies == copy:
        if cut is not None:
            local, found = cut.part(local, found)
        yield from runs(local, found, tuple(weight.shape))


def keep_part(weight: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of whole values into a weight that may be sharded."""
    found = intervals(weight) if isinstance(weight, DTensor) else None
    own = whole
    for at, one in enumerate(found or ()):
        own = own.index_select(at, _index(one))
    own_part(weight.detach()).copy_(own)


def _merged(weight: MergedWeight, local: Tensor, found: list[Intervals]) -> Tensor:
    """Adds an adapter to this rank's part of its layer; only the adapter is gathered."""
    down, up = full_tensor(weight.down), full_tensor(weight.up)
    left, right = (down.t(), up.t()) if weight.transposed else (up, down)
    rows, columns = (_index(one).to(left.device) for one in found)
    return torch.addmm(local.to(left.device), left[rows], right[:, columns], alpha=weight.scale)


def _index(one: Intervals) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in one]) if one else torch.empty(0, dtype=torch.long)


def _copy(weight: DTensor, tensor: tuple[int, int]) -> tuple[int, int]:
    """Returns which copy of its part this rank holds, and how many there are."""
    mesh, number, count = weight.device_mesh, 0, 1
    for dimension, placement in enumerate(weight.placements):
        if placement.is_replicate():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
            count *= mesh.size(dimension)
    if not set(mesh.mesh_dim_names or ()) & set(SPLIT):  # each rank of a tensor group holds it
        number, count = number * tensor[1] + tensor[0], count * tensor[1]
    return number, count


def intervals(weight: DTensor) -> list[Intervals] | None:
    """Returns, for each dimension, the ranges of the whole weight that this rank's part consists of.

    Returns ``None`` on all ranks if a dimension is divided unevenly twice.
    """
    found: list[Intervals] = [[(0, size)] for size in weight.shape]
    for dimension, placement in enumerate(weight.placements):
        if placement.is_replicate():
            continue
        ranks, rank = weight.device_mesh.size(dimension), weight.device_mesh.get_local_rank(dimension)
        at = placement.dim % weight.ndim  # type: ignore[attr-defined]
        groups = 1 if isinstance(placement, Shard) else placement.split_factor  # type: ignore[attr-defined]
        if groups > 1 and weight.shape[at] % groups:
            return None
        found[at] = _chunk(found[at], rank, ranks, groups)
    return found


def _chunk(parts: Intervals, rank: int, ranks: int, groups: int) -> Intervals:
    """Returns the rank's chunk of ranges, or with several groups of equal size its chunk of each, as torch divides."""
    total = sum(end - first for first, end in parts)
    width = total // groups
    chosen = []
    for group in range(groups):
        size = -(-width // ranks)
        first = min(width, rank * size)
        chosen.append((group * width + first, group * width + min(width, first + size)))
    edges = [0]
    for first, end in parts:
        edges.append(edges[-1] + end - first)
    found: Intervals = []
    for start, stop in chosen:
        for (first, _), (low, high) in zip(parts, pairwise(edges), strict=True):
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                found.append((first + begin - low, first + end - low))
    return found


def runs(local: Tensor, found: list[Intervals], shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields a part as runs of neighboring elements of the whole weight, each with the place of its first one there.

    Args:
        local: The part.
        found: For each dimension the ranges of the whole weight that the part consists of.
        shape: Shape of the whole weight.
    """
    if not local.numel():
        return
    cut = [at for at, one in enumerate(found) if one != [(0, shape[at])]]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :])
    starts = torch.zeros(1, dtype=torch.long)
    for at in range(last):
        stride = math.prod(shape[at + 1 :])
        starts = (starts[:, None] + _index(found[at])[None, :] * stride).flatten()
    rows = local.reshape(len(starts), -1, inner) if shape else local.reshape(1, 1, 1)
    for row, start in zip(rows, starts.tolist(), strict=True):
        place = 0
        for first, end in found[last] if shape else [(0, 1)]:
            yield start + first * inner, row[place : place + end - first]
            place += end - first
