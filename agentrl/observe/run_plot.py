"""Draws metrics of several runs as one picture, PNG or SVG.

Guarantees: the picture depends on the runs' metrics alone; runs that differ in their seed only are one curve, the mean
over the seeds at each step that all of them have, with a band from the least to the largest seed. A step without a
number is a gap; a metric that no run has is refused with those that there are. Ticks are whole steps. Over minutes of
wall time, seeds are interpolated between their records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.config.errors import UserError
from agentrl.core.registry import nearest
from agentrl.observe.curve import _whole_steps, _with_gaps, moving_average
from agentrl.observe.metric_glossary import described

COLOURS = ("#3f51b5", "#d1772c", "#2b8a66", "#9a4fb0", "#b3362c", "#6b6f78", "#1d7fa3", "#8a6d1b")
FORMATS = (".png", ".svg")
FIRST = (
    "reward/mean_drawn",
    "eval/reward",
    "metrics/accuracy",
    "eval/accuracy",
    "tokens/completion_mean",
    "train/loss",
)
WIDTH, HEIGHT = 6.4, 3.0  # inches of one panel
Record = Mapping[str, float]


@dataclass(frozen=True)
class Curve:
    """Runs of one recipe: a run, or several that differ in their seed only.

    Attributes:
        name: Name in the legend.
        seeds: Metric records of each seed's run, by step, in order.
    """

    name: str
    seeds: Sequence[Sequence[Record]]

    def has(self, metric: str) -> bool:
        """Whether a seed's run has the metric."""
        return any(metric in record for records in self.seeds for record in records)

    def band(
        self, metric: str, smooth: int = 1, *, minutes: bool = False
    ) -> tuple[list[float], list[float], list[float], list[float]]:
        """Returns steps, means, least and largest values, at the steps that all seeds with the metric have.

        Args:
            metric: Name of the metric.
            smooth: Steps of the moving average of each seed; evaluations are not averaged.
            minutes: Whether to return minutes since the run's first record instead of steps: those of all seeds, as
                far as all were measured.
        """
        found, window = [], 1 if metric.startswith("eval/") else smooth
        for records in self.seeds:
            points = [
                (place(records, record, minutes=minutes), record[metric]) for record in records if metric in record
            ]
            values = moving_average([value for _, value in points], window)
            found.append(dict(zip((at for at, _ in points), values, strict=True)))
        found = [points for points in found if points]
        if minutes and len(found) > 1:
            found = _interpolated(found)
        places = sorted(set.intersection(*(set(points) for points in found))) if found else []
        rows = [[points[at] for points in found] for at in places]
        return places, [fmean(row) for row in rows], [min(row) for row in rows], [max(row) for row in rows]


def place(records: Sequence[Record], record: Record, *, minutes: bool) -> float:
    """Returns where a run's record stands on the axis: its step, or the minutes since the run's first record."""
    return (record["time"] - records[0]["time"]) / 60 if minutes else record["step"]


def _interpolated(seeds: Sequence[Mapping[float, float]]) -> list[dict[float, float]]:
    """Returns the values of each seed at the places of all, from the last first place to the first last one."""
    import numpy as np

    low, high = max(map(min, seeds)), min(map(max, seeds))
    grid = sorted({at for points in seeds for at in points if low <= at <= high})
    found = []
    for one in seeds:
        places = sorted(one)
        found.append(dict(zip(grid, np.interp(grid, places, [one[at] for at in places]).tolist(), strict=True)))
    return found


def metric_names(curves: Sequence[Curve]) -> list[str]:
    """Returns the names of all metrics that a run has, sorted."""
    names = {name for curve in curves for records in curve.seeds for record in records for name in record}
    return sorted(names - {"step", "time"})


def chosen(curves: Sequence[Curve], wanted: Sequence[str]) -> list[str]:
    """Returns the metrics to draw: those that are wanted, else what tells most of a run.

    Raises:
        UserError: No run has a wanted metric, or there is nothing to draw.
    """
    known = metric_names(curves)
    for name in wanted:
        if name not in known:
            raise UserError(
                f"no run has the metric {name!r}{nearest(name, known) or '.'} There are: {', '.join(known)}"
            )
    found = list(wanted) or [name for name in FIRST if name in known] or known[:1]
    if not found:
        raise UserError("the runs have no metric yet")
    return found


def draw(
    curves: Sequence[Curve],
    metrics: Sequence[str],
    files: Sequence[Path],
    *,
    smooth: int = 1,
    apart: bool = False,
    minutes: bool = False,
) -> None:
    """Draws the picture into each file, PNG or SVG by its name.

    Args:
        curves: Curves to draw, each with a colour of its own.
        metrics: Metrics, one row of panels each.
        files: Files to write.
        smooth: Steps of the moving average.
        apart: Whether each curve has a column of its own, with a common scale, instead of all in one panel.
        minutes: Whether the axis is the time since each run's first record, instead of its steps.

    Raises:
        UserError: A file has another ending, or cannot be written.
    """
    for file in files:
        if file.suffix.lower() not in FORMATS:
            raise UserError(f"{file} is neither PNG nor SVG: end its name with {' or '.join(FORMATS)}")
    figure = figure_of(curves, metrics, smooth=smooth, apart=apart, minutes=minutes)
    import matplotlib

    for file in files:
        partial = file.with_name(f".{file.stem}.partial{file.suffix}")
        try:
            with matplotlib.rc_context({"svg.hashsalt": "agentrl"}):  # the same runs give the same bytes
                figure.savefig(partial, dpi=140, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
            partial.replace(file)
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}") from error


def figure_of(
    curves: Sequence[Curve], metrics: Sequence[str], *, smooth: int = 1, apart: bool = False, minutes: bool = False
) -> Any:
    """Returns the picture as a figure of matplotlib; arguments as in :func:`draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = [[curve] for curve in curves] if apart else [list(curves)]
    figure = Figure(figsize=(WIDTH * len(columns), HEIGHT * len(metrics) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(metrics), len(columns), sharex="col", sharey="row" if apart else "none", squeeze=False)
    colour = {curve.name: COLOURS[at % len(COLOURS)] for at, curve in enumerate(curves)}
    for row, metric in zip(axes, metrics, strict=True):
        for axis, shown in zip(row, columns, strict=True):
            for curve in shown:
                _plot(axis, curve, metric, colour[curve.name], smooth, minutes=minutes)
            axis.grid(alpha=0.25)
            axis.margins(y=0.08)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_title(metric, fontsize=11, loc="left")
        row[0].set_ylabel(described(metric)["unit"] or "")
    for at, shown in enumerate(columns):
        if minutes:
            axes[-1][at].set_xlabel("minutes since the first record")
            axes[-1][at].margins(x=0.02)
        else:
            _whole_steps(axes[-1][at])
        if apart:
            axes[0][at].set_title(_label(shown[0]), fontsize=11, loc="right")
    if not apart and any(axis.get_legend_handles_labels()[0] for axis in axes[:, 0]):
        first = next(axis for axis in axes[:, 0] if axis.get_legend_handles_labels()[0])
        first.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, frameon=False)  # covers no curve
    return figure


def _plot(axis: Any, curve: Curve, metric: str, colour: str, smooth: int, *, minutes: bool) -> None:
    steps, means, least, largest = curve.band(metric, smooth, minutes=minutes)
    if not steps:
        return
    whole, line = (steps, means) if minutes else _with_gaps(list(zip(steps, means, strict=True)))
    few = len(steps) <= 20
    axis.plot(whole, line, color=colour, linewidth=1.7, marker="." if few else None, label=_label(curve))
    if len(curve.seeds) > 1:
        axis.fill_between(steps, least, largest, color=colour, alpha=0.18, linewidth=0)
    elif any(f"{metric}_low" in record for record in curve.seeds[0]):
        found = [record for record in curve.seeds[0] if metric in record and f"{metric}_low" in record]
        axis.errorbar(
            [place(curve.seeds[0], record, minutes=minutes) for record in found],
            [record[metric] for record in found],
            yerr=[
                [max(0.0, record[metric] - record[f"{metric}_low"]) for record in found],
                [max(0.0, record[f"{metric}_high"] - record[metric]) for record in found],
            ],
            fmt="none",
            ecolor=colour,
            capsize=3,
            linewidth=1.0,
        )


def _label(curve: Curve) -> str:
    return curve.name if len(curve.seeds) == 1 else f"{curve.name}, {len(curve.seeds)} seeds (least to largest)"
