"""Rows of a file of JSON lines, or of one JSON array, as they are written there.

Guarantees: a value is what its line says: a text that looks like a date stays a text, and a number keeps all its
digits, whatever other lines hold in its place. All lines are parsed once, so that a broken one is told before work
starts; a row is parsed again when it is asked for. The lines are kept in memory as bytes, so that a file which changes
meanwhile changes nothing.
"""

import codecs
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import orjson

from agentrl.config.errors import DataError
from agentrl.core.valid_text import valid_data

_LONG_INTEGER = re.compile(rb"(?<![.0-9])[0-9]{19}")  # orjson makes floats of integers that 64 bits do not hold


class JsonLines(Sequence[dict[str, Any]]):
    """Rows of a file, each made when it is asked for; empty lines are skipped.

    Args:
        file: The file.

    Raises:
        DataError: A line is not a JSON object.
    """

    def __init__(self, file: Path) -> None:
        self._data = _lines(file)
        self._ends = array("q")  # first byte and end of each line, in turns
        for start, end, _ in _objects(file, self._data):
            self._ends.extend((start, end))

    def __len__(self) -> int:
        return len(self._ends) // 2

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[one] for one in found]
        return _parsed(self._data[self._ends[2 * found] : self._ends[2 * found + 1]])


def json_lines(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the JSON object of each line of a file and the line's place as ``file:number``; empty lines are skipped.

    Raises:
        DataError: A line is not a JSON object.
    """
    number, counted, data = 1, 0, _lines(file)
    for start, _, line in _objects(file, data):
        number, counted = number + data.count(b"\n", counted, start), start
        yield line, f"{file}:{number}"


def _lines(file: Path) -> bytes:
    """Returns the lines of a file; an array gets one for each element."""
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not data.lstrip().startswith(b"["):
        return data
    try:
        return b"\n".join(json.dumps(one).encode() for one in json.loads(data, parse_constant=_refuse_constant))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error


def _objects(file: Path, data: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields first byte, end and object of each line that is not empty."""
    start = number = 0
    while start < len(data):
        number += 1
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        text = data[start:end]
        if text.strip():
            try:
                line = _parsed(text)
            except ValueError as error:
                raise DataError(f"{file}:{number} is not JSON: {error}") from error
            if not isinstance(line, dict):
                raise DataError(f"{file}:{number} is no JSON object: {str(line)[:80]}")
            yield start, end, line
        start = end + 1


def _parsed(text: bytes) -> Any:
    """Parses a line; one with long integers or halves of surrogate pairs with Python's own parser."""
    if not _LONG_INTEGER.search(text):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            if b"\\ud" not in text.lower():
                raise
    return valid_data(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
