"""File of lines that a full disk may leave out, but never cuts.

Guarantees: each line is in the file as a whole or not at all; a line that cannot be written is left out, which is said
once for a file, with its reason; when there is room again, the file goes on. A line that an earlier process cut is
removed before the first line is added (:func:`drop_cut_line`).
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)
_BLOCK = 1 << 16


class WholeLines:
    """Appends lines to a file.

    Args:
        path: File, made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._size = drop_cut_line(path)
        self.left_out = 0

    def add(self, line: bytes) -> bool:
        """Append a line, which ends with a line end; returns whether it is in the file."""
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            if written:
                self._file.truncate(self._size)
            if not self.left_out:
                log.warning("%s cannot be written, lines are left out of it: %s", self._path, error)
            self.left_out += 1
            return False
        self._size += len(line)
        return True

    def add_all(self, lines: Sequence[bytes]) -> None:
        """Append lines with one call of the system, or one by one where there is no room for all."""
        if len(lines) == 1 or not self._together(b"".join(lines)):
            for line in lines:
                self.add(line)

    def _together(self, lines: bytes) -> bool:
        """Appends lines; returns whether they are in the file, of which nothing is otherwise."""
        try:
            if self._file.write(lines) == len(lines):
                self._size += len(lines)
                return True
        except OSError:
            pass  # said by the first line that is left out
        self._file.truncate(self._size)
        return False

    def close(self) -> None:
        """Close the file, and say how many lines are not in it."""
        if self.left_out and not self._file.closed:
            log.warning("%s lacks %d lines, for which the disk had no room", self._path, self.left_out)
        self._file.close()


def drop_cut_line(path: Path) -> int:
    """Removes a last line that a killed process did not write to its end; returns the size of what is left."""
    size = _whole(path)
    if size < path.stat().st_size:
        os.truncate(path, size)
    return size


def _whole(path: Path) -> int:
    """Returns the size of a file without a last line that was not written to its end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - _BLOCK)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            size = start
    return 0
