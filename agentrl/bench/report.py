"""Shows repeated measurements as a table or one JSON line.

Guarantees: every key has its median, smallest and largest value, and number of repeats.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import orjson
from rich.table import Table

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def default_model() -> str:
    """Folder of the model that benchmarks use."""
    from agentrl.data.models import resolve_model

    return str(resolve_model(MODEL).path)


def statistics(results: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | int]]:
    """Median, minimum, maximum and number of values of each key.

    Args:
        results: Measured values by key, at least one for each.
    """
    return {
        key: {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}
        for key, values in results.items()
    }


def json_line(results: Mapping[str, Sequence[float]]) -> str:
    """Returns ``{"key": {"median": ..., "min": ..., "max": ..., "n": ...}, ...}`` on one line."""
    return orjson.dumps(statistics(results)).decode()


def table(results: Mapping[str, Sequence[float]], title: str) -> Table:
    """Returns the statistics as a table for the terminal."""
    shown = Table(title=title)
    shown.add_column("key")
    for name in ("median", "min", "max", "n"):
        shown.add_column(name, justify="right")
    for key, row in statistics(results).items():
        shown.add_row(key, *(f"{row[name]:.4g}" for name in ("median", "min", "max")), str(row["n"]))
    return shown
