"""Builds the tables of evaluation results at the end of a run.

Guarantees: every number has its 95% interval, or the note that it has none; failed episodes are counted separately
from wrong answers.
"""

from collections.abc import Mapping

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
_LAST = ("tool_calls", "tool_calls_ok", "reward")


def summary_table(before: Mapping[str, float], after: Mapping[str, float]) -> Table:
    """Builds a table of the evaluations before and after training.

    Args:
        before: Metrics of the first evaluation, ``eval/accuracy``, ``eval/accuracy_low``, ``eval/accuracy_high``, ...
        after: Metrics of the last evaluation.
    """
    table = Table(title="Held-out tasks, before and after training", caption=_caption(before, after))
    table.add_column("")
    table.add_column("before [95% interval]".replace("[", r"\["), justify="right")
    table.add_column("after [95% interval]".replace("[", r"\["), justify="right")
    found = metric_names({**before, **after})
    for name in [*_LABELS, *(n for n in found if n not in _LABELS and n not in _LAST), *_LAST]:
        if name in found:
            table.add_row(_LABELS.get(name, name), with_interval(before, name), with_interval(after, name))
    return table


def metric_names(metrics: Mapping[str, float]) -> list[str]:
    """Lists the names of the evaluated metrics, without ``eval/``, interval bounds and counts."""
    names = [key.removeprefix("eval/") for key in metrics if key.startswith("eval/")]
    return [name for name in names if not name.endswith(("_low", "_high")) and name not in ("n", "invalid", "examples")]


def evaluation_table(metrics: Mapping[str, float], title: str) -> Table:
    """Builds a table of one evaluation: each metric with its interval, and the number of invalid episodes.

    Args:
        metrics: ``eval/<metric>``, ``eval/<metric>_low``, ``eval/<metric>_high``, ``eval/n``, ``eval/invalid``.
        title: Title of the table.
    """
    table = Table(title=title)
    table.add_column("")
    table.add_column("value [95% interval]".replace("[", r"\["), justify="right")
    for name in metric_names(metrics):
        table.add_row(name, with_interval(metrics, name))
    table.add_row("judged", f"{metrics.get('eval/n', 0):.0f}")
    table.add_row("invalid", f"{metrics.get('eval/invalid', 0):.0f}")
    return table


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
    show = _percent if name in _SHARES or name.startswith("pass@") else _number
    if low is None or high is None:
        return f"{show(value)} (no interval)"
    return rf"{show(value)} \[{show(low)}, {show(high)}]"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _caption(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    if "eval/examples" in after and "eval/n" not in after:
        return f"{after['eval/examples']:.0f} held-out examples"
    counts = [
        f"{when}: {metrics.get('eval/n', 0):.0f} judged, {metrics.get('eval/invalid', 0):.0f} invalid"
        for when, metrics in (("before", before), ("after", after))
    ]
    return "; ".join(counts)
