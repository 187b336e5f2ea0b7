"""Reads a packed part of an episodes file (:mod:`agentrl.core.packed_episodes`), line by line.

Guarantees: a line is made when it is asked for, from arrays that are decompressed once: opening one episode of
thousands does not make the others.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.core.packed_texts import PutBack

PIECES = "pieces.json"
_ARRAYS = ("token_ids", "loss_mask", "versions", "logprobs", "teacher", "places")
_EARLIER_SHIFT = 19  # of parts that do not name it
_DIGITS = 20  # of integers that 64 bits may not hold
_LONG_INTEGER = re.compile(rb"(?<![.0-9])[0-9]{%d}" % _DIGITS)


@dataclass(frozen=True)
class PackedLine:
    """A line of a packed part: the byte of the file at which it began, and the line with its end."""

    place: int
    data: bytes


class PackedPart(Sequence[PackedLine]):
    """Lines of a packed part.

    Args:
        file: The part.

    Attributes:
        places: The byte of the file at which each line began.
    """

    def __init__(self, file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            self._lines = split_lines(archive.read("episodes.jsonl"))
            arrays = {name: np.load(io.BytesIO(archive.read(f"{name}.npy"))) for name in _ARRAYS}
            names = set(archive.namelist())
            self._texts = PutBack(archive.read(PIECES) if PIECES in names else b"{}")
            if "vocabulary.npy" in names:
                vocabulary = np.load(io.BytesIO(archive.read("vocabulary.npy")))
                arrays["token_ids"] = vocabulary[arrays["token_ids"]]
            self._shift = json.loads(archive.comment).get("shift", _EARLIER_SHIFT)
        self.places: list[int] = arrays["places"].tolist()
        self._arrays = arrays
        self._mask = np.unpackbits(arrays["loss_mask"])[: len(arrays["token_ids"])].astype(bool)
        self._sampled = np.concatenate([[0], np.cumsum(self._mask)])  # tokens with mask 1 before each token
        self._starts = [(0, 0)]  # first token of each line, and first token with a teacher's logprob
        for line in self._lines:
            self._starts.append(self._end_of(line, *self._starts[-1]))

    def _end_of(self, line: bytes, token: int, teacher: int) -> tuple[int, int]:
        if b'"tokens":' not in line:
            return token, teacher
        for node in _packed_nodes(record_of(line)):
            start, token = token, token + node["tokens"]
            if "teacher" in node:
                teacher += int(self._sampled[token] - self._sampled[start])
        return token, teacher

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> PackedLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedLine]: ...
    def __getitem__(self, index: int | slice) -> PackedLine | list[PackedLine]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[one] for one in found]
        return PackedLine(self.places[found], self._line(found))

    def _line(self, number: int) -> bytes:
        line = self._lines[number]
        record = record_of(line)
        if record is None:
            return line
        token, teacher = self._starts[number]
        for node in _packed_nodes(record):
            token, teacher = self._give(node, token, teacher)
        return orjson.dumps(record) + b"\n"

    def _give(self, node: dict[str, Any], token: int, teacher: int) -> tuple[int, int]:
        end = token + node.pop("tokens")
        mask, first, last = self._mask[token:end], *self._sampled[[token, end]].tolist()
        node["token_ids"] = self._arrays["token_ids"][token:end].tolist()
        node["loss_mask"] = mask.astype(np.uint8).tolist()
        node["logprobs"] = self._filled(mask, self._arrays["logprobs"][first:last])
        node["versions"] = _placed(mask, self._arrays["versions"][first:last], -1)
        node["teacher_logprobs"] = []
        if node.pop("teacher", False):
            start, teacher = teacher, teacher + last - first
            node["teacher_logprobs"] = self._filled(mask, self._arrays["teacher"][start:teacher])
        if "texts" in node:
            self._texts.give(node)
        return end, teacher

    def _filled(self, mask: NDArray[np.bool_], codes: NDArray[np.uint16]) -> list[float]:
        values = (codes.astype(np.uint32) << np.uint32(self._shift)).view(np.float32)
        return _placed(mask, values.astype(float), 0.0)


def _placed(mask: NDArray[np.bool_], values: NDArray[Any], elsewhere: float) -> list[Any]:
    found = np.full(len(mask), elsewhere, values.dtype)
    found[mask] = values
    return found.tolist()


def record_of(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; ``None`` for one that is kept as it is: no object, or with longer integers.

    orjson reads integers beyond 64 bits as floats, and such a task would come back as another.
    """
    try:
        if _LONG_INTEGER.search(line):
            json.loads(line, parse_int=_short)  # a text may hold as many digits
        record = orjson.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _short(digits: str) -> int:
    if len(digits) >= _DIGITS:
        raise ValueError(digits)
    return int(digits)


def nodes_of(record: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes of an episode's record, role by role."""
    trajectories = record.get("trajectories")
    for trajectory in trajectories.values() if isinstance(trajectories, dict) else ():
        nodes = trajectory.get("nodes") if isinstance(trajectory, dict) else None
        yield from nodes if isinstance(nodes, list) else ()


def _packed_nodes(record: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for node in nodes_of(record or {}):
        if isinstance(node, dict) and "tokens" in node and "token_ids" not in node:
            yield node


def split_lines(data: bytes) -> list[bytes]:
    """Returns lines with their ends; only a line feed ends one."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]]
