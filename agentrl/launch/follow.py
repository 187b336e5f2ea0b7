"""A growing ``metrics.jsonl``, read while a run writes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class MetricsTail:
    """Reads a growing ``metrics.jsonl``.

    Args:
        path: The file; it may not exist yet. What stands in it already is skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Records that were completed since the last call."""
        if not self._path.is_file():
            return
        with open(self._path, encoding="utf-8") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith("\n"):
                self._offset = file.tell()
                yield json.loads(line)
