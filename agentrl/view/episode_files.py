"""Reads single episodes from the files of a run by their place, while the run writes them.

Guarantees: files are only read; a last line that is not whole yet is left for later; a place stays the same for the
life of the run. A line that is no JSON object is skipped and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from agentrl.config.errors import UserError

Kind = Literal["train", "eval"]
FILES: dict[str, str] = {"train": "episodes.jsonl", "eval": "eval-episodes.jsonl"}
KINDS: tuple[Kind, ...] = ("train", "eval")
HEAD = 200  # bytes that tell one file from another of the same name
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Line:
    """A whole line of a file: its first byte, its length with the line end, and its bytes."""

    place: int
    length: int
    data: bytes


@dataclass(frozen=True)
class EpisodeFile:
    """The file of training or evaluation episodes of a run, which may not exist yet.

    Attributes:
        path: File.
    """

    path: Path

    def size(self) -> int:
        """Returns the size in bytes; 0 without a file."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def identity(self) -> str:
        """Returns what tells this file from another one of the same name: its beginning."""
        with self.path.open("rb") as file:
            return file.read(HEAD).hex()

    def lines(self, first: int, end: int) -> Iterator[Line]:
        """Yields the whole lines that begin in ``[first, end)``, except the line that holds byte ``first - 1``."""
        with self.path.open("rb") as file:
            place = first
            if first:
                file.seek(first - 1)
                place += len(_rest(file)) - 1
            while place < end:
                data = file.readline()
                if not data.endswith(b"\n"):
                    return
                yield Line(place, len(data), data)
                place += len(data)

    def read(self, place: int) -> dict[str, Any]:
        """Reads the episode at a place.

        Raises:
            UserError: No episode begins there.
        """
        with self.path.open("rb") as file:
            if place:
                file.seek(place - 1)
            before = file.read(1) if place else b"\n"
            line = file.readline()
        if before != b"\n" or not line.endswith(b"\n"):
            raise UserError(f"{self.path} has no episode at byte {place}")
        found = parse(line)
        if found is None:
            raise UserError(f"{self.path} has a damaged line at byte {place}")
        return found


def _rest(file: Any) -> bytes:
    """Reads to the end of the line that the file stands in."""
    return file.readline()


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
