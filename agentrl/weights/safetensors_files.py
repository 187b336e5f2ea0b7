"""Lays weights out in safetensors files, whose bytes several ranks then write.

Guarantees: a file is as large as it will be before anything is written, so that a full disk shows first; files and
index are those that ``from_pretrained`` reads.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

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


def places(shapes: Sequence[Named], dtype: torch.dtype, largest: int, *, rest: bool) -> list[tuple[str, int]]:
    """Returns the file of each weight, and the offset of its data there in bytes; see :func:`make_files`."""
    found: list[tuple[str, int]] = []
    for name, members in files(shapes, dtype, largest, rest=rest):
        offset = len(safetensors_header(members, dtype))
        for _, shape in members:
            found.append((name, offset))
            offset += math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    return found


def files(shapes: Sequence[Named], dtype: torch.dtype, largest: int, *, rest: bool) -> list[tuple[str, list[Named]]]:
    """Divides weights, in order, into files of at most ``largest`` bytes; a larger weight has one of its own.

    With ``rest`` one more file, which is not listed, belongs to them.
    """
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
    return list(zip(_names(len(parts) + rest), parts, strict=False))


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def make_files(
    folder: Path, shapes: Sequence[Named], dtype: torch.dtype, rest: Mapping[str, Tensor], largest: int
) -> None:
    """Makes the files with their headers and room for the weights, and the index if they are several.

    Args:
        folder: Folder of the files.
        shapes: Names and shapes of the weights.
        dtype: Their element type.
        rest: Tensors of any type, which are written now, into a file of their own.
        largest: Most bytes of a file.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    where: dict[str, str] = {}
    total = 0
    laid = files(shapes, dtype, largest, rest=bool(rest))
    for name, members in laid:
        header, nbytes = safetensors_header(members, dtype), sum(math.prod(shape) for _, shape in members) * itemsize
        with open(folder / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)
            file.write(header)
        where |= {one: name for one, _ in members}
        total += nbytes
    if rest:
        last = _names(len(laid) + 1)[-1]
        save_file(
            {name: tensor.contiguous() for name, tensor in rest.items()}, folder / last, metadata={"format": "pt"}
        )
        where |= dict.fromkeys(rest, last)
        total += sum(tensor.nbytes for tensor in rest.values())
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
