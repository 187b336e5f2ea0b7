"""The curves of a run, read from its metrics as they are written.

Guarantees: each line is read once; later values of a step replace earlier ones, and a file that became shorter, as
after a resume, is read anew. A line that is no JSON, and a value that is no finite number, is left out. A step without
a value is a gap (``None``), never 0.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.view.episode_files import EpisodeFile, parse

FILE = "metrics.jsonl"


class MetricHistory:
    """Metrics of one run by step.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = EpisodeFile(folder / FILE)
        self._lock = threading.Lock()
        self._end = 0
        self._identity = ""
        self._steps: dict[int, dict[str, float]] = {}
        self.records: list[dict[str, float]] = []  # as they were written: a step may have one more for its evaluation

    def update(self) -> int:
        """Read what is new; returns the number of new records."""
        with self._lock:
            size = self._file.size()
            identity = self._file.identity()[:40] if size else ""
            if size < self._end or not identity.startswith(self._identity):
                self._end, self._steps, self.records = 0, {}, []
            self._identity = identity
            before = len(self.records)
            if size > self._end:
                for line in self._file.lines(self._end, size):
                    self._end = line.place + line.length
                    self._add(parse(line.data) or {})
            return len(self.records) - before

    def _add(self, record: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in record.items() if _is_number(value)}
        if "step" not in numbers:
            return
        self.records.append(numbers)
        self._steps.setdefault(int(numbers["step"]), {}).update(numbers)

    def names(self) -> list[str]:
        """Returns the names of all metrics, sorted."""
        with self._lock:
            return sorted({name for step in self._steps.values() for name in step} - {"step", "time"})

    def columns(self, names: Sequence[str]) -> dict[str, list[float | None]]:
        """Returns ``step`` and each metric as a column over the steps."""
        with self._lock:
            steps = sorted(self._steps)
            found: dict[str, list[float | None]] = {"step": [float(step) for step in steps]}
            for name in names:
                found[name] = [self._steps[step].get(name) for step in steps]
            return found

    def latest(self) -> dict[str, float]:
        """Returns the latest value of each metric."""
        with self._lock:
            return {name: value for step in sorted(self._steps) for name, value in self._steps[step].items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
