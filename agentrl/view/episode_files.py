"""Reads single episodes from the files of a run by their place, while the run writes them.

Guarantees: files are only read; a last line that is not whole yet is left for later. A run's packed parts and its
newest file are one stream of bytes, as if nothing had been packed: a place in it stays the same for the life of the
run. A line that is no JSON object is skipped and counted.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import orjson

from agentrl.config.errors import UserError
from agentrl.core.packed_episodes import HEAD, SUFFIX, comment_of, earlier_parts
from agentrl.core.packed_part import PackedPart

Kind = Literal["train", "eval"]
FILES: dict[str, str] = {"train": "episodes.jsonl", "eval": "eval-episodes.jsonl"}
KINDS: tuple[Kind, ...] = ("train", "eval")
_UNPACKED = 2  # packed parts that are kept in memory
_TRIES = 3  # a part may be packed, or a file become a part, while it is looked for


@dataclass(frozen=True)
class Line:
    """A whole line: its first byte in the stream, its length with the line end as it was written, and its bytes."""

    place: int
    length: int
    data: bytes


@dataclass(frozen=True)
class Part:
    """A file of the stream: where it begins there, and its size as it was written."""

    path: Path
    start: int
    size: int

    @property
    def packed(self) -> bool:
        """Whether the file is packed."""
        return self.path.suffix == SUFFIX


@dataclass(frozen=True)
class EpisodeFile:
    """The episodes of a run, of training or evaluation, which may not exist yet; any other file of lines as well.

    Attributes:
        path: Newest file.
    """

    path: Path

    def parts(self) -> list[Part]:
        """Returns the files of the stream, in order."""
        for last in range(_TRIES):
            try:
                return self._parts()
            except FileNotFoundError:  # one was packed just now
                if last == _TRIES - 1:
                    raise
        raise AssertionError

    def _parts(self) -> list[Part]:
        found, start = [], 0
        for path in [*earlier_parts(self.path), *([self.path] if self.path.is_file() else [])]:
            size = _comment(path)["bytes"] if path.suffix == SUFFIX else path.stat().st_size
            found.append(Part(path, start, size))
            start += size
        return found

    def size(self) -> int:
        """Returns the size in bytes; 0 without a file."""
        parts = self.parts()
        return parts[-1].start + parts[-1].size if parts else 0

    def identity(self) -> str:
        """Returns what tells this stream from another one of the same name: its beginning."""
        first = self.parts()[0]
        if first.packed:
            return _comment(first.path)["head"]
        with first.path.open("rb") as file:
            return file.read(HEAD).hex()

    def whole_end(self, first: int, end: int, block: int = 1 << 20) -> int:
        """Returns the end of the last whole line in ``[first, end)``; ``first`` if none ends there."""
        for part in reversed(self.parts()):
            begin, stop = max(first, part.start), min(end, part.start + part.size)
            if begin >= stop:
                continue
            if part.packed or stop < part.start + part.size:
                return stop  # parts end with a line's end
            with part.path.open("rb") as file:
                while stop > begin:
                    start = max(begin, stop - block)
                    file.seek(start - part.start)
                    found = file.read(stop - start).rfind(b"\n")
                    if found >= 0:
                        return start + found + 1
                    stop = start
        return first

    def lines(self, first: int, end: int) -> Iterator[Line]:
        """Yields the whole lines that begin in ``[first, end)``, except the line that holds byte ``first - 1``."""
        for part in self.parts():
            if part.start < end and first < part.start + part.size:
                yield from _lines(part, first, end)

    def read(self, place: int) -> dict[str, Any]:
        """Reads the episode at a place.

        Raises:
            UserError: No episode begins there.
        """
        part = next((one for one in self.parts() if one.start <= place < one.start + one.size), None)
        line = None if part is None else _line_at(part, place - part.start)
        if line is None:
            raise UserError(f"{self.path} has no episode at byte {place}")
        found = parse(line)
        if found is None:
            raise UserError(f"{self.path} has a damaged line at byte {place}")
        return found


@lru_cache(maxsize=4096)
def _comment(path: Path) -> dict[str, Any]:
    return comment_of(path)


@lru_cache(maxsize=_UNPACKED)
def _unpacked(path: Path) -> PackedPart:
    return PackedPart(path)


def _lines(part: Part, first: int, end: int) -> Iterator[Line]:
    if part.packed:
        lines = _unpacked(part.path)
        ends = [*lines.places[1:], part.size]
        for number, (place, stop) in enumerate(zip(lines.places, ends, strict=True)):
            if first <= part.start + place < end:
                yield Line(part.start + place, stop - place, lines[number].data)
        return
    with part.path.open("rb") as file:
        place = max(first, part.start)
        if place > part.start:
            file.seek(place - part.start - 1)
            place += len(file.readline()) - 1  # to the end of the line that holds the byte before
        while place < end:
            data = file.readline()
            if not data.endswith(b"\n"):
                return
            yield Line(place, len(data), data)
            place += len(data)


def _line_at(part: Part, at: int) -> bytes | None:
    """Returns the line that begins at a byte of a part; ``None`` if none does."""
    if part.packed:
        lines = _unpacked(part.path)
        found = bisect.bisect_left(lines.places, at)
        return lines[found].data if found < len(lines) and lines.places[found] == at else None
    with part.path.open("rb") as file:
        if at:
            file.seek(at - 1)
        before = file.read(1) if at else b"\n"
        line = file.readline()
    return line if before == b"\n" and line.endswith(b"\n") else None


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns a line's JSON object; ``None`` for a damaged line."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def episode_file(folder: Path, kind: str) -> EpisodeFile:
    """Returns a run's file of episodes.

    Raises:
        UserError: ``kind`` is neither ``train`` nor ``eval``.
    """
    if kind not in FILES:
        raise UserError(f"no episodes of kind {kind!r}; want train or eval")
    return EpisodeFile(folder / FILES[kind])
