"""Format of the journal's lines: JSON with a chained checksum.

Guarantees: each line ends with a CRC-32 of itself and of the checksum before it, so that a line that was changed,
removed, repeated or moved is noticed and named. A last line that was not written to its end is recognised; it is no
error, because a process may be killed while it writes.
"""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from agentrl.config.errors import UserError

FILE = "journal.jsonl"
_SEAL = b',"crc":"'  # before the eight digits that end a line, its brace and its line end
_TAIL = len(_SEAL) + 8 + len(b'"}\n')


class JournalError(UserError):
    """The journal of a run is damaged, or does not belong to a checkpoint."""


class OlderFormat(UserError):
    """The journal of a run was written by an older version, whose lines have no checksums."""


class Position(NamedTuple):
    """Place in a journal, after a whole line.

    Attributes:
        lines: Number of lines before it.
        crc: Checksum of the last of them; 0 before the first line.
    """

    lines: int = 0
    crc: int = 0


class Journaled(NamedTuple):
    """Contents of a journal's file.

    Attributes:
        records: Records in order; the line of ``records[i]`` is ``i + 1``.
        checksums: Checksum of each line.
        size: Bytes of the whole lines; what stands behind them is a line that was cut.
    """

    records: list[dict[str, Any]]
    checksums: list[int]
    size: int

    @property
    def end(self) -> Position:
        """Position after the last whole line."""
        return Position(len(self.checksums), self.checksums[-1] if self.checksums else 0)


def seal(record: dict[str, Any], before: int) -> tuple[bytes, int]:
    """Formats a record as a line.

    Args:
        record: Plain data.
        before: Checksum of the line before; 0 for the first one.

    Returns:
        The line, and its checksum.
    """
    text = orjson.dumps(record)[:-1]
    crc = zlib.crc32(text, before)
    return b'%b%b%08x"}\n' % (text, _SEAL, crc), crc


def read_journal(path: Path) -> Journaled:
    """Reads a journal and compares all checksums; a last line that was cut is left out.

    Raises:
        JournalError: A line is damaged.
        OlderFormat: No line has a checksum.
    """
    found = Journaled([], [], 0)
    if not path.is_file():
        return found
    before = size = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):  # only the last one can be
            break
        text, sealed = line[:-_TAIL], line[-_TAIL:]
        expected = zlib.crc32(text, before)
        if sealed != b'%b%08x"}\n' % (_SEAL, expected):
            if number == 1 and _is_record(line):
                raise OlderFormat(
                    f"{path} is of an older format, whose lines have no checksums: an older version of agentrl wrote "
                    "it, and nothing can be proved from it, nor can its run be resumed"
                )
            raise JournalError(
                f"{path}, line {number}: wrong checksum: the line, or the one before it, is not what was written"
            )
        found.records.append(orjson.loads(text + b"}"))
        found.checksums.append(expected)
        before, size = expected, size + len(line)
    return found._replace(size=size)


def _is_record(line: bytes) -> bool:
    """Whether a line is a record as it was written before lines had checksums."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(record, dict) and "outcome" in record and "crc" not in record
