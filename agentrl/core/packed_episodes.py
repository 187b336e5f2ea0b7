"""Packs lines of an episodes file: a tenth of the size, for keeping.

Guarantees: a packed part holds every line, in order; unpacked, a line is the same record, but for logprobs, which keep
a relative precision of :data:`PRECISION`. It says how many bytes and episodes it was, and where each line began. A line
that is no record, or whose tokens are not as :class:`~agentrl.core.episode.Node` says, is kept as it was.

A part is a zip file with the methods LZMA and bzip2, which Python's ``zipfile`` and ``numpy.load`` read:

- ``episodes.jsonl``: the records, one a line. A node has ``tokens``, the number of its tokens, in the place of
  ``token_ids``, ``loss_mask``, ``logprobs``, ``versions`` and ``teacher_logprobs``, and ``teacher`` where it had these.
  Texts of a message that its ids say are empty, and ``texts`` has their places (:mod:`agentrl.core.packed_texts`).
- ``pieces.json``: the bytes of these ids; parts of earlier versions have none.
- ``token_ids.npy``: the ids of all nodes with ``tokens``, one after the other, each as its place in
  ``vocabulary.npy``, which begins with the most frequent one; parts of earlier versions have the ids themselves.
- ``loss_mask.npy``: their loss masks, eight in a byte (``numpy.unpackbits``).
- ``versions.npy``: versions of the tokens whose mask is 1; those of others are -1.
- ``logprobs.npy``, ``teacher.npy``: logprobs of the tokens whose mask is 1, 0.0 elsewhere: the 15 highest bits of a
  float32, rounded.
- ``places.npy``: the byte of the file at which each line began.

The zip's comment is JSON: ``bytes`` of the file, number of ``episodes``, ``head``, its first bytes in hexadecimal, and
``shift``, the bits of a float32 that logprobs leave out (19 where it is missing: parts of earlier versions).
"""

import bz2
import io
import json
import lzma
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.core.packed_part import PIECES, PackedPart, nodes_of, record_of, split_lines
from agentrl.core.packed_texts import LeftOut, Pieces

SUFFIX = ".zip"
PRECISION = 2.0**-7  # of logprobs: six bits behind the first one, rounded
HEAD = 200  # bytes that tell one file from another
_TRIED = 1 << 20  # bytes with which the methods of packing are compared
_SHIFT = 17  # bits of a float32 that are left out
_ADDED = frozenset({"tokens", "teacher", "texts"})  # keys of a packed node
_COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions")


def pack(data: bytes, pieces: Pieces | None = None) -> bytes:
    """Packs whole lines.

    Args:
        data: Bytes of an episodes file, up to a line's end.
        pieces: Bytes of an id of the run's tokenizer; without it, texts are kept beside the ids that say them.
    """
    lines = data.splitlines(keepends=True) if b"\r" not in data else split_lines(data)
    places = np.cumsum([0, *(len(line) for line in lines)])[:-1]
    texts = None if pieces is None else LeftOut(pieces)
    packed = _Columns(texts)
    records = b"".join(packed.line(line) for line in lines)
    comment = {"bytes": len(data), "episodes": len(lines), "head": data[:HEAD].hex(), "shift": _SHIFT}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.comment = json.dumps(comment).encode()
        archive.writestr("episodes.jsonl", records, _smaller(records))
        if texts is not None:
            archive.writestr(PIECES, table := texts.table(), _smaller(table))
        for name, values in (packed.arrays() | {"places": places}).items():
            buffer = io.BytesIO()
            np.save(buffer, values)
            archive.writestr(f"{name}.npy", buffer.getvalue(), _smaller(buffer.getvalue()))
    return target.getvalue()


def _smaller(data: bytes) -> int:
    """Returns the method that packs the beginning of some data best: numbers and texts differ in it."""
    tried = data[:_TRIED]
    return zipfile.ZIP_BZIP2 if len(bz2.compress(tried)) < len(lzma.compress(tried)) else zipfile.ZIP_LZMA


class _Columns:
    """Collects the tokens of nodes."""

    def __init__(self, texts: LeftOut | None) -> None:
        self._texts = texts
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.versions: list[int] = []
        self.logprobs: list[float] = []
        self.teacher: list[float] = []

    def line(self, line: bytes) -> bytes:
        """Returns a line without the tokens of its nodes, which are added to the columns."""
        record = record_of(line)
        if record is None:
            return line
        for node in nodes_of(record):
            if _fits(node):
                self._take(node)
        return orjson.dumps(record) + b"\n"

    def _take(self, node: dict[str, Any]) -> None:
        if self._texts is not None:
            self._texts.take(node)
        chosen = [at for at, mask in enumerate(node["loss_mask"]) if mask]
        self.ids += node["token_ids"]
        self.mask += node["loss_mask"]
        self.versions += [node["versions"][at] for at in chosen]
        self.logprobs += [node["logprobs"][at] for at in chosen]
        teacher = node.pop("teacher_logprobs", [])
        if teacher:
            self.teacher += [teacher[at] for at in chosen]
            node["teacher"] = True
        node["tokens"] = len(node["token_ids"])
        for name in _COLUMNS:
            del node[name]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the columns as they are stored."""
        vocabulary, places, counts = np.unique(np.array(self.ids, np.uint32), return_inverse=True, return_counts=True)
        frequent = np.argsort(-counts, kind="stable")
        rank = np.empty(len(frequent), np.uint16 if len(frequent) <= 1 << 16 else np.uint32)
        rank[frequent] = np.arange(len(frequent))
        return {
            "vocabulary": vocabulary[frequent],
            "token_ids": rank[places],
            "loss_mask": np.packbits(np.array(self.mask, np.uint8)),
            "versions": np.array(self.versions, np.int32),
            "logprobs": _short(self.logprobs),
            "teacher": _short(self.teacher),
        }


def _fits(node: Any) -> bool:
    """Whether a node's tokens can be packed without a loss but that of precision."""
    if not isinstance(node, dict) or any(not isinstance(node.get(name), list) for name in _COLUMNS):
        return False
    if not _ADDED.isdisjoint(node):
        return False
    ids, mask, logprobs, versions = (node[name] for name in _COLUMNS)
    teacher = node.get("teacher_logprobs", [])
    if len({len(ids), len(mask), len(logprobs), len(versions)}) != 1 or len(teacher) not in (0, len(ids)):
        return False
    return all(
        isinstance(one, int) and 0 <= one < 1 << 32 and (m == 1 or (m == 0 and logprob == 0 and version == -1))
        for one, m, logprob, version in zip(ids, mask, logprobs, versions, strict=True)
    ) and not any(value for value, m in zip(teacher, mask, strict=bool(teacher)) if not m)


def _short(values: Sequence[float]) -> NDArray[np.uint16]:
    bits = np.array(values, np.float32).view(np.uint32)
    return ((bits.astype(np.uint64) + (1 << (_SHIFT - 1))) >> _SHIFT).astype(np.uint16)


def comment_of(file: Path) -> dict[str, Any]:
    """Returns what a packed part says of itself: ``bytes``, ``episodes``, ``head`` and ``shift``."""
    with zipfile.ZipFile(file) as archive:
        return json.loads(archive.comment)


def parts_folder(file: Path) -> Path:
    """Returns the folder of an episodes file's earlier parts: ``episodes`` beside ``episodes.jsonl``."""
    return file.with_suffix("")


def earlier_parts(file: Path) -> list[Path]:
    """Returns the earlier parts of an episodes file in order, each packed if it is already, else plain."""
    folder = parts_folder(file)
    if not folder.is_dir():
        return []
    found: dict[str, Path] = {}
    for part in sorted(folder.iterdir()):
        if part.suffix == SUFFIX or (part.suffix == ".jsonl" and part.stem not in found):
            found[part.stem] = part
    return [found[stem] for stem in sorted(found)]


def all_lines(file: Path) -> Iterator[bytes]:
    """Yields the whole lines of an episodes file and of its earlier parts, the earliest first.

    Raises:
        FileNotFoundError: There is neither.
    """
    parts = earlier_parts(file)
    for part in parts:
        yield from part_lines(part)
    if file.is_file() or not parts:
        yield from _whole_lines(file)


def part_lines(part: Path) -> Iterator[bytes]:
    """Yields the lines of an earlier part, which may be packed meanwhile."""
    if part.suffix != SUFFIX and part.is_file():
        yield from _whole_lines(part)
    else:
        yield from (line.data for line in PackedPart(part.with_suffix(SUFFIX)))


def _whole_lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def pack_parts(file: Path, pieces: Pieces | None = None) -> int:
    """Packs the plain earlier parts of an episodes file; returns their number.

    A part is replaced in one step: a process that is killed leaves it plain or packed, and both are read.

    Args:
        file: ``episodes.jsonl`` or ``eval-episodes.jsonl`` of a run.
        pieces: Bytes of an id of the run's tokenizer, see :func:`pack`.
    """
    count = 0
    for part in earlier_parts(file):
        if part.suffix == SUFFIX:
            part.with_suffix(".jsonl").unlink(missing_ok=True)  # left by a process that was killed
            continue
        partial = part.with_suffix(".partial")
        partial.write_bytes(pack(part.read_bytes(), pieces))
        partial.replace(part.with_suffix(SUFFIX))
        part.unlink()
        count += 1
    return count
