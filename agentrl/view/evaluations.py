"""The evaluations of a run, and two of them compared task by task.

Guarantees: numbers are those of the report files; a comparison is over the tasks that both judged, and says how many.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.observe.summary import metric_names
from agentrl.view.shown_runs import read_json

COUNTS = ("n", "invalid", "abandoned", "version_min", "version_max")
MAIN = ("accuracy", "reward")

REPORTS = ("eval-*.json", "result.json")


def reports(folder: Path) -> list[dict[str, Any]]:
    """Returns each evaluation: its file, step, metrics with intervals, set-up, answers and notes.

    Args:
        folder: Folder of a run.
    """
    found = []
    for pattern in REPORTS:
        for file in sorted(folder.glob(pattern)):
            report = read_json(file)
            if report is not None:
                found.append(_report(file, report))
    return found


def _report(file: Path, report: dict[str, Any]) -> dict[str, Any]:
    numbers = _numbers(report)
    digits = file.stem.removeprefix("eval-")
    tags = report.get("tags")
    return {
        "name": file.stem,
        "step": int(digits) if digits.isdigit() else None,
        "counts": _counts(numbers),
        "metrics": {name: _estimate(numbers, name) for name in sorted(metric_names(numbers))},
        "tags": {tag: one for tag, own in tags.items() if (one := _of_tag(own))} if isinstance(tags, dict) else {},
        "setup": report.get("setup") or {},
        "answers": report.get("answers") or {},
        "notes": report.get("notes") or [],
        "failures": report.get("failures") or {},
        "per_task": sorted(report.get("per_task") or {}),
    }


def _numbers(report: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in report.items() if _is_number(name, value)}


def _counts(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: numbers[f"eval/{name}"] for name in COUNTS if f"eval/{name}" in numbers}


def _estimate(numbers: Mapping[str, float], name: str) -> dict[str, float | None]:
    found = {which: numbers.get(f"eval/{name}_{which}") for which in ("low", "high", "if_wrong", "if_right")}
    return {"mean": numbers[f"eval/{name}"], **found}


def _of_tag(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the main metric of the tasks with a tag; ``None`` if none of them was judged."""
    numbers = _numbers(own)
    name = next((one for one in MAIN if f"eval/{one}" in numbers), None)
    return None if name is None else {"name": name, "counts": _counts(numbers), **_estimate(numbers, name)}


def _is_number(name: str, value: Any) -> bool:
    return name.startswith("eval/") and isinstance(value, int | float) and math.isfinite(value)


def report_file(folder: Path, name: str) -> Path:
    """Returns where a report's scores of single tasks are: its file, or the folder of an ``agentrl eval``.

    Raises:
        UserError: There is no such report.
    """
    known = [one["name"] for one in reports(folder)]
    if name not in known:
        raise UserError(f"{folder.name} has no evaluation {name!r}; it has: {', '.join(known) or 'none'}")
    return folder if name == "result" else folder / f"{name}.json"


def compared(first: tuple[Path, str], second: tuple[Path, str]) -> dict[str, Any]:
    """Compares two evaluations of the same tasks, as ``agentrl eval --compare`` does.

    Args:
        first: Folder of a run, and the name of its report.
        second: The same of the other evaluation.

    Returns:
        ``metrics``: change with its 95% interval, p-value and number of tasks; ``tasks``: of each common task the
        values of both, those that changed most first; ``setups``: what was set differently.

    Raises:
        UserError: One is no evaluation, or they judged no task together.
    """
    from agentrl.evaluate.compare import compare, read_scored

    files = report_file(*first), report_file(*second)
    found = compare(*files)
    metrics = {
        name: {
            "mean": one.change.mean,
            "low": _finite(one.change.low),
            "high": _finite(one.change.high),
            "p": _finite(one.p),
            "tasks": one.change.tasks,
        }
        for name, one in sorted(found.differences.items())
    }
    before, after = (read_scored(file).tasks for file in files)
    tasks = [
        {
            "task": task,
            "first": {name: before[task].scores.get(name) for name in metrics},
            "second": {name: after[task].scores.get(name) for name in metrics},
        }
        for task in before.keys() & after.keys()
        if before[task].valid and after[task].valid
    ]
    lead = next(name for name in (*MAIN, *metrics) if name in metrics)
    tasks.sort(key=lambda one: (-_moved(one, lead), one["task"]))
    return {"metrics": metrics, "tasks": tasks, "lead": lead, "setups": list(found.setups), "changed": found.changed}


def _moved(task: dict[str, Any], name: str) -> float:
    first, second = task["first"][name], task["second"][name]
    return -1.0 if first is None or second is None else abs(second - first)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
