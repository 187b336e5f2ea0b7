"""Lines of the live view beside its table: progress, trend, speed, waits, and the last answer.

Guarantees: pure but for :func:`last_answer`, which reads the end of a file; a sentence is absent where its numbers are.
An interval is Student's at 95%, over steps; it is absent where there are fewer than :data:`FEWEST` of them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median, stdev
from typing import Any

import orjson

from agentrl.core.images import shown_text
from agentrl.observe.shown_text import plain

Record = Mapping[str, float]
WINDOW = 20  # last steps that a trend is computed from
FEWEST = 4
ALONE = 2  # servers that have a line each
_SESSIONS = re.compile(r", (\d+) sessions")
SHOWN = 300  # characters of the last answer
_TAIL = 1 << 20  # bytes of an episodes file that are read for it


def progress(steps: Sequence[Record], total: int, elapsed: float, budget: float | None) -> str:
    """Says how much time is left, by the median of the last steps and the time budget.

    Args:
        steps: Records of the steps so far.
        total: Steps that the run makes at most.
        elapsed: Seconds since its start.
        budget: Seconds that it may take; ``None`` for no limit.
    """
    durations = [record["time/step"] for record in steps[-WINDOW:] if "time/step" in record]
    if not durations:
        return ""
    by_steps = max(0.0, total - steps[-1].get("step", 0)) * median(durations)
    left = by_steps if budget is None else min(by_steps, max(0.0, budget - elapsed))
    why = "" if budget is None or left == by_steps else ", by the time budget"
    return f"about {duration(left)} left{why}"


def trend(steps: Sequence[Record], name: str, key: str) -> str:
    """Says the mean of a metric over the last steps and its change a step, each with its interval."""
    points = [(record["step"], record[key]) for record in steps[-WINDOW:] if key in record and "step" in record]
    if len(points) < FEWEST:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return ""
    mean, half = fmean(ys), student(len(ys) - 1) * stdev(ys) / math.sqrt(len(ys))
    slope, start = linear_regression(xs, ys)
    rest = sum((y - start - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    spread = student(len(points) - 2) * math.sqrt(rest / sum((x - fmean(xs)) ** 2 for x in xs))
    return (
        f"{name} of the last {len(points)} steps {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}], "
        f"a step {slope:+.4f} [{slope - spread:+.4f}, {slope + spread:+.4f}]"
    )


def student(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def speed(record: Record) -> str:
    """Says tokens a second of generation and training, and the age of the batch."""
    parts = []
    if record.get("time/step") and "tokens/completion_total" in record:
        parts.append(f"generation {record['tokens/completion_total'] / record['time/step']:,.0f} tokens/s")
    if record.get("time/update") and record.get("train/tokens"):
        parts.append(f"training {record['train/tokens'] / record['time/update']:,.0f} tokens/s")
    if "staleness/mean" in record:
        parts.append(f"age {record['staleness/mean']:.1f}, at most {record.get('staleness/max', 0):.0f}")
    return " · ".join(parts)


def waits(status: Mapping[str, Any]) -> list[str]:
    """Says what each process does or waits for, one line each; many servers that do the same share a line.

    Args:
        status: Answer of the controller's ``GET /status``; empty without one.
    """
    found = []
    for wait in _with_servers_together(status.get("waits") or ()):
        since = f", for {duration(wait['seconds'])}" if wait.get("seconds") is not None else ""
        found.append(f"{wait['process']}: {wait['doing']}{since}")
    return found


def _with_servers_together(waits: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the waits, with one for all servers of a state where those are many; sessions are summed up."""
    alike: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for wait in waits:
        if "://" in wait["process"]:
            alike[_SESSIONS.sub("", wait["doing"])].append(wait)
    found: list[Mapping[str, Any]] = []
    for wait in waits:
        same = alike.get(_SESSIONS.sub("", wait["doing"]), []) if "://" in wait["process"] else []
        if len(same) <= ALONE:
            found.append(wait)
        elif wait is same[0]:
            counts = [int(match[1]) for one in same if (match := _SESSIONS.search(one["doing"]))]
            sessions = f", {sum(counts)} sessions" if counts else ""
            state = _SESSIONS.sub("", wait["doing"])
            found.append({"process": f"{len(same)} servers", "doing": f"{state}{sessions}"})
    return found


def last_answer(file: Path) -> str:
    """Returns the last answer of the newest episode with its reward, as one line; empty without one.

    Args:
        file: ``episodes.jsonl`` of the run.
    """
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _TAIL))
        lines = opened.read().split(b"\n")[:-1]
    if not lines or (len(lines) < 2 and size > _TAIL):
        return ""
    try:
        record = orjson.loads(lines[-1])
    except orjson.JSONDecodeError:
        return ""
    nodes = [node for one in (record.get("trajectories") or {}).values() for node in one.get("nodes") or ()]
    sampled = [node for node in nodes if node.get("finish_reason") is not None]
    if not sampled:
        return ""
    message = sampled[-1]["message"]
    calls = " ".join(str((call.get("function") or {}).get("name")) for call in message.get("tool_calls") or ())
    said = plain(shown_text(message.get("content")).strip() or f"calls {calls}").replace("\n", " ⏎ ")
    reward = "none" if record.get("reward") is None else f"{record['reward']:.3f}"
    return f"last answer, reward {reward}: {said[:SHOWN]}"


def duration(seconds: float) -> str:
    """Formats a duration in one unit."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
