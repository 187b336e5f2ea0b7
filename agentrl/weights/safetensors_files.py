"""Lays weights out in safetensors files, whose bytes several ranks then write.

Guarantees: a file is as large as it will be before anything is written, so that a full disk shows first; files and
index are those that ``from_pretrained`` reads.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

LARGEST = 5_000_000_000  # bytes of a file, as on the hub
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names

Named = tuple[str, Sequence[int]]


def safetensors_header(shapes: Sequence[Named], dtype: torch.dtype) -> bytes:
    """Header of a safetensors file that holds these tensors one after the other (format: 8-byte size, JSON, data)."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes:
        end = offset + math.prod(shape) * itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def places(shapes: Sequence[Named], dtype: torch.dtype, largest: int = LARGEST) -> list[tuple[str, int]]:
    """Returns the file of each weight, and the offset of its data there in bytes."""
    found: list[tuple[str, int]] = []
    for name, members in files(shapes, dtype, largest):
        offset = len(safetensors_header(members, dtype))
        for _, shape in members:
            found.append((name, offset))
            offset += math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return found


def files(shapes: Sequence[Named], dtype: torch.dtype, largest: int = LARGEST) -> list[tuple[str, list[Named]]]:
    """Divides weights, in order, into files of at most ``largest`` bytes; a larger weight has one of its own."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    parts: list[list[Named]] = [[]]
    room = largest
    for named in shapes:
        nbytes = math.prod(named[1]) * itemsize
        if parts[-1] and nbytes > room:
            parts.append([])
            room = largest
        parts[-1].append(named)
        room -= nbytes
    if len(parts) == 1:
        return [(SINGLE, parts[0])]
    return [(f"model-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts, 1)]


def make_files(folder: Path, shapes: Sequence[Named], dtype: torch.dtype, largest: int = LARGEST) -> None:
    """Makes the files with their headers and room for the weights, and the index if they are several."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    where: dict[str, str] = {}
    total = 0
    for name, members in files(shapes, dtype, largest):
        header, nbytes = safetensors_header(members, dtype), sum(math.prod(shape) for _, shape in members) * itemsize
        with open(folder / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
            file.write(header)
        where |= {one: name for one, _ in members}
        total += nbytes
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
