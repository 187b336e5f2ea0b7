"""Builds the tables of evaluation results at the end of a run.

Guarantees: every number has its 95% interval, or the note that it has none; failed episodes are counted separately
from wrong answers; a change is of the tasks that both evaluations judged. No interval is broken at 80 columns: where a
table is too wide, each interval stands below its number.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape, render
from rich.measure import Measurement
from rich.table import Table

_LABELS = {
    "accuracy": "test accuracy",
    "format": "format rate",
    "tool_used": "calls a tool well",
    "pair_accuracy": "pair accuracy",
    "truncated": "cut off",
}
_SHARES = {
    "accuracy",
    "format",
    "tool_used",
    "tool_calls_ok",
    "first_accuracy",
    "token_accuracy",
    "pair_accuracy",
    "truncated",
}
# In the names of numbers that stand beside a metric.
_BESIDE = ("_low", "_high", "_tasks", "_episodes", "_if_wrong", "_if_right")
_COUNTS = ("n", "invalid", "abandoned", "examples", "version_min", "version_max")
OF_SUBSETS = ("pass@", "pass^", "maj@")  # beginnings of the names of metrics that are of subsets of k samples
SHORTEST_NAME = 12  # columns of a name, also where the values leave fewer
ALL_PASSES = 4  # up to this many samples every pass@k has a row
_LAST = ("tool_calls", "tool_calls_ok", "reward")


Changes = Mapping[str, tuple[float, float, float, int]]  # by metric: mean, lower and upper bound, tasks compared


def summary_table(
    before: Mapping[str, float],
    after: Mapping[str, float],
    changes: Changes | None = None,
    setup: Mapping[str, Any] | None = None,
) -> "Fitting":
    """Builds a table of the evaluations before and after training.

    Args:
        before: Metrics of the first evaluation, ``eval/accuracy``, ``eval/accuracy_low``, ``eval/accuracy_high``, ...
        after: Metrics of the last evaluation.
        changes: Change of each metric over the tasks that both judged; NaN bounds for no interval.
        setup: Settings of the evaluations, see :func:`setup_line`.
    """
    changes = changes or {}
    table = Table(
        title="Held-out tasks, before and after training", caption=_caption(before, after, changes, setup or {})
    )
    table.add_column("", overflow="fold")
    for column in ("before", "after", *(["change, paired"] if changes else [])):
        table.add_column(rf"{column} \[95% interval]", justify="right")
    found = metric_names({**before, **after})
    for name in [*_LABELS, *(n for n in found if n not in _LABELS and n not in _LAST), *_LAST]:
        if name in found and is_shown(name, found):
            cells = [with_interval(before, name), with_interval(after, name)]
            table.add_row(escape(_LABELS.get(name, name)), *cells, *([shown_change(name, changes)] if changes else []))
    return Fitting(table)


class Fitting:
    """A table that is printed with intervals below their numbers where it is too wide otherwise.

    Args:
        table: Table whose cells are texts with an interval behind their number.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table as it is, or the narrower one."""
        wanted = Measurement.get(console, options.update(width=console.width * 9), self._table).maximum
        yield self._table if wanted <= options.max_width else _narrow(self._table, options.max_width)


def _narrow(table: Table, width: int) -> Table:
    """Returns a copy of a table with a line break before each interval, and names folded to what is left of a width."""
    columns = [[_broken(str(cell)) for cell in (column.header, *column.cells)] for column in table.columns]
    of_values = sum(
        max(len(line) for cell in cells for line in render(cell).plain.split("\n")) for cells in columns[1:]
    )
    narrow = Table(title=table.title, caption=table.caption)
    narrow.add_column("", overflow="fold", max_width=max(SHORTEST_NAME, width - of_values - 3 * len(columns) - 1))
    for header, *_ in columns[1:]:
        narrow.add_column(header, justify="right")
    for row in zip(*(cells[1:] for cells in columns), strict=True):
        narrow.add_row(*row)
    return narrow


def _broken(cell: str) -> str:
    return cell.replace(r" \[", "\n\\[").replace(" (no", "\n(no")


def setup_line(setup: Mapping[str, Any]) -> str:
    """Formats what an evaluation had set: temperature, limit of an answer, tasks and samples.

    Args:
        setup: Set-up of an evaluation; a temperature or limit of ``None`` is the API's own.
    """
    temperature, limit = setup["temperature"], setup["max_new_tokens"]
    if temperature is None:
        how = "the API's own temperature"
    else:
        how = "greedy (temperature 0)" if temperature == 0 else f"temperature {temperature:g}"
    longest = "the API's own limit of an answer" if limit is None else f"up to {limit:.0f} tokens an answer"
    samples = f"{setup['samples']:.0f} {'sample' if setup['samples'] == 1 else 'samples'} a task"
    tasks = f"{setup['tasks']:.0f} {'task' if setup['tasks'] == 1 else 'tasks'}"
    return f"{how}, {longest}, {tasks}, {samples}"


def metric_names(metrics: Mapping[str, float]) -> list[str]:
    """Lists the names of the evaluated metrics, without ``eval/``, interval bounds and counts."""
    names = [key.removeprefix("eval/") for key in metrics if key.startswith("eval/")]
    beside = {f"{name}{what}" for name in names for what in _BESIDE}
    return [name for name in names if name not in beside and name not in _COUNTS]


def is_shown(name: str, names: Sequence[str]) -> bool:
    """Whether a metric is shown: of many ``pass@k``, those of powers of two and the last.

    Args:
        name: Name of the metric.
        names: Names of all metrics, see :func:`metric_names`.
    """
    beginning = next((one for one in OF_SUBSETS if name.startswith(one)), None)
    if beginning is None:
        return True
    k = int(name.removeprefix(beginning))
    if k == 1 and beginning != "pass@":  # the same as pass@1
        return False
    most = max(int(other.removeprefix(beginning)) for other in names if other.startswith(beginning))
    return most <= ALL_PASSES or k == most or k & (k - 1) == 0


def evaluation_table(metrics: Mapping[str, float], title: str, answers: Mapping[str, int] | None = None) -> "Fitting":
    """Builds a table of one evaluation: each metric with its interval, and the number of invalid episodes.

    Where episodes are invalid, their share stands beside every number, and what the number would be if all of them
    were wrong, and right.

    Args:
        metrics: ``eval/<metric>``, ``eval/<metric>_low``, ``eval/<metric>_high``, ``eval/n``, ``eval/invalid``.
        title: Title of the table.
        answers: Number of answers, ``all``, and of those that say nothing, by kind.
    """
    table = Table(title=escape(title))
    table.add_column("", overflow="fold")
    table.add_column("value [95% interval]".replace("[", r"\["), justify="right")
    n, invalid = metrics.get("eval/n", 0), metrics.get("eval/invalid", 0)
    if invalid:
        table.add_column("invalid", justify="right")
        table.add_column("if wrong / right", justify="right")
    names = metric_names(metrics)
    samples = max((int(one[5:]) for one in names if one.startswith("pass@")), default=1)
    for name in (one for one in names if is_shown(one, names)):
        label = f"{name} (avg@{samples})" if name == "accuracy" and samples > 1 else name
        table.add_row(escape(label), *cells(metrics, name))
    table.add_row("judged", f"{n:.0f}")
    table.add_row("invalid", f"{invalid:.0f}")
    if metrics.get("eval/abandoned"):
        table.add_row("abandoned", f"{metrics['eval/abandoned']:.0f}")
    for kind, count in (answers or {}).items():
        if kind != "all":
            table.add_row(f"answers {kind}", f"{count} of {answers['all'] if answers else 0}")
    return Fitting(table)


def cells(metrics: Mapping[str, float], name: str) -> list[str]:
    """Formats a metric with its interval, and where episodes are invalid their share and the metric's bounds."""
    n, invalid = metrics.get("eval/n", 0), metrics.get("eval/invalid", 0)
    if not invalid:
        return [with_interval(metrics, name)]
    show = _percent if _is_share(name) else _number
    bounds = [metrics.get(f"eval/{name}_{which}") for which in ("if_wrong", "if_right")]
    shown = " / ".join(show(one) for one in bounds if one is not None)
    return [with_interval(metrics, name), _percent(invalid / (n + invalid)), shown]


def with_interval(metrics: Mapping[str, float], name: str) -> str:
    """Formats a metric as ``12.5% [7.1%, 20.9%]``, with the brackets escaped for rich.

    Args:
        metrics: Evaluation metrics.
        name: Name of the metric, without ``eval/``.
    """
    value = metrics.get(f"eval/{name}")
    if value is None:
        return "not measured"
    low, high = metrics.get(f"eval/{name}_low"), metrics.get(f"eval/{name}_high")
    show = _percent if _is_share(name) else _number
    counts = {what: metrics.get(f"eval/{name}_{what}") for what in ("tasks", "episodes")}
    of = "".join(f" of {count:.0f} {what}" for what, count in counts.items() if count is not None)
    if low is None or high is None:
        return f"{show(value)} (no interval){of}"
    return rf"{show(value)} \[{show(low)}, {show(high)}]{of}"


def shown_change(name: str, changes: Changes) -> str:
    """Formats a change as ``+12.5 points [7.1, 20.9]`` of a share, or as plain numbers."""
    if name not in changes:
        return "not compared"
    scale, digits, unit = (100, 1, " points") if _is_share(name) else (1, 3, "")
    mean, low, high = (round(scale * value, digits) for value in changes[name][:3])
    if math.isnan(low):
        return f"{mean:+.{digits}f}{unit} (no interval)"
    return rf"{mean:+.{digits}f}{unit} \[{low:+.{digits}f}, {high:+.{digits}f}]"


def shown_value(name: str, value: float) -> str:
    """Formats a value of a metric."""
    return (_percent if _is_share(name) else _number)(value)


def _is_share(name: str) -> bool:
    return name in _SHARES or name.startswith((*OF_SUBSETS, "stop/"))


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


def _caption(
    before: Mapping[str, float], after: Mapping[str, float], changes: Changes, setup: Mapping[str, Any]
) -> str:
    if "eval/examples" in after and "eval/n" not in after:
        return f"{after['eval/examples']:.0f} held-out examples"
    parts = [
        f"{when}: {metrics.get('eval/n', 0):.0f} judged, {metrics.get('eval/invalid', 0):.0f} invalid"
        for when, metrics in (("before", before), ("after", after))
    ]
    if changes:
        parts.append(f"change: {max(one[3] for one in changes.values())} tasks judged both times")
    if setup:
        parts.append(setup_line(setup))
    return "; ".join(parts)
