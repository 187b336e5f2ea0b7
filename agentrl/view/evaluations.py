"""The evaluations of a run, and two of them compared task by task.

Guarantees: numbers are those of the report files; a comparison is over the tasks that both judged, and says how many.
"""

import math
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.view.shown_runs import read_json

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
    numbers = {name.removeprefix("eval/"): value for name, value in report.items() if _is_number(name, value)}
    bounds = ("_low", "_high")
    counts = {"n", "invalid", "abandoned", "version_min", "version_max"}
    names = sorted(n for n in numbers if not n.endswith(bounds) and n not in counts and not n.endswith("_tasks"))
    metrics = {n: {"mean": numbers[n], "low": numbers.get(f"{n}_low"), "high": numbers.get(f"{n}_high")} for n in names}
    digits = file.stem.removeprefix("eval-")
    return {
        "name": file.stem,
        "step": int(digits) if digits.isdigit() else None,
        "counts": {name: numbers[name] for name in counts if name in numbers},
        "metrics": metrics,
        "setup": report.get("setup") or {},
        "answers": report.get("answers") or {},
        "notes": report.get("notes") or [],
        "per_task": sorted(report.get("per_task") or {}),
    }


def _is_number(name: str, value: Any) -> bool:
    return name.startswith("eval/") and isinstance(value, int | float) and math.isfinite(value)


def per_task(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """Returns a report's mean of each metric in each task.

    Raises:
        UserError: There is no such report, or it does not say.
    """
    known = {one["name"]: one for one in reports(folder)}
    if name not in known:
        raise UserError(f"{folder.name} has no evaluation {name!r}; it has: {', '.join(known) or 'none'}")
    found = (read_json(folder / f"{name}.json") or {}).get("per_task")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{name} of {folder.name} says nothing of single tasks: there is nothing to pair")
    return found


def compared(first: tuple[Path, str], second: tuple[Path, str]) -> dict[str, Any]:
    """Compares two evaluations of the same tasks.

    Args:
        first: Folder of a run, and the name of its report.
        second: The same of the other evaluation.

    Returns:
        ``metrics``: change with its 95% interval and number of tasks; ``tasks``: of each common task the values of
        both, those that changed most first.

    Raises:
        UserError: They have no task in common.
    """
    from agentrl.evaluate.paired import changes

    before, after = per_task(*first), per_task(*second)
    found = changes(before, after)
    if not found:
        raise UserError("the two evaluations have no task in common")
    metrics = {
        name: {"mean": one.mean, "low": _finite(one.low), "high": _finite(one.high), "tasks": one.tasks}
        for name, one in sorted(found.items())
    }
    names = {task for name in found for task in before[name].keys() & after[name].keys()}
    tasks = [
        {
            "task": task,
            "first": {name: before[name].get(task) for name in found},
            "second": {name: after[name].get(task) for name in found},
        }
        for task in names
    ]
    lead = "accuracy" if "accuracy" in found else "reward" if "reward" in found else min(found)
    tasks.sort(key=lambda one: (-_moved(one, lead), one["task"]))
    return {"metrics": metrics, "tasks": tasks, "lead": lead}


def _moved(task: dict[str, Any], name: str) -> float:
    first, second = task["first"][name], task["second"][name]
    return -1.0 if first is None or second is None else abs(second - first)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
