"""Fingerprints of tensors that several ranks write together, without one that sees all bytes.

On a shared disk another host's cache may hold older bytes of a file, so each rank counts what it writes itself.
Guarantees: the fingerprints are those of :func:`~agentrl.core.weight_manifest.fingerprint` of the whole tensors. The
checksum of the exclusive or of equally long data is that of their checksums and a constant, so the parts, each with
zeros in the places of the others, give the checksum of the whole.
"""

import zlib
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.core.weight_manifest import windows


class PartPrints:
    """Checksums of the bytes that this rank has written of a version's tensors.

    Args:
        nbytes: Size of each tensor.
        heads: Number of a tensor -> how many of its first bytes all ranks are to be told.
    """

    def __init__(self, nbytes: Sequence[int], heads: dict[int, int]) -> None:
        self._nbytes = list(nbytes)
        self._changes = torch.zeros(len(self._nbytes), dtype=torch.int64)
        self._heads = {number: torch.zeros(size, dtype=torch.uint8) for number, size in heads.items()}
        self._current: tuple[int, bytearray] | None = None

    def add(self, number: int, place: int, data: memoryview) -> None:
        """Counts bytes that this rank alone writes; those of one tensor follow each other.

        Args:
            number: Number of the tensor.
            place: Place of the first byte in the tensor.
            data: The bytes.
        """
        end, length = place + len(data), 0
        for first, last in windows(self._nbytes[number]):
            start, stop = max(first, place), min(last, end)
            if start < stop:
                kept = self._bytes(number)
                at = length + start - first
                kept[at : at + stop - start] = data[start - place : stop - place]
            length += last - first
        if number in self._heads and place < len(self._heads[number]):
            head = self._heads[number][place:end]
            head.copy_(torch.frombuffer(bytearray(data[: len(head)]), dtype=torch.uint8))

    def _bytes(self, number: int) -> bytearray:
        """Returns the windows of a tensor, with zeros where this rank has not written."""
        if self._current is None or self._current[0] != number:
            self._settle()
            self._current = number, bytearray(_length(self._nbytes[number]))
        return self._current[1]

    def _settle(self) -> None:
        if self._current is not None:
            number, kept = self._current
            self._changes[number] = zlib.crc32(kept) ^ zlib.crc32(bytes(len(kept)))
            self._current = None

    def changes(self) -> Tensor:
        """Returns, for each tensor, by what this rank's bytes change the checksum of zeros: int64, ``[tensors]``."""
        self._settle()
        return self._changes

    def gathered(self) -> tuple[list[str], dict[int, bytes]]:
        """Returns the fingerprint of each tensor, and the first bytes that were asked for; a collective."""
        own = self.changes()
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        for head in self._heads.values():
            dist.all_reduce(head)  # a byte is written by one rank, and 0 on the others
        return combined(self._nbytes, found), {number: head.numpy().tobytes() for number, head in self._heads.items()}


def combined(nbytes: Sequence[int], changes: Sequence[Tensor]) -> list[str]:
    """Returns the fingerprints of tensors that ranks have written together.

    Args:
        nbytes: Size of each tensor.
        changes: Result of :meth:`PartPrints.changes` on each rank.
    """
    total = reduce(torch.bitwise_xor, changes)
    empty = {length: zlib.crc32(bytes(length)) for length in {_length(size) for size in nbytes}}
    return [
        f"{size:x}:{empty[_length(size)] ^ change:08x}" for size, change in zip(nbytes, total.tolist(), strict=True)
    ]


def _length(size: int) -> int:
    """Returns the bytes in the windows of a tensor of ``size`` bytes."""
    return sum(end - start for start, end in windows(size))
