"""Draws the reward, the loss and the evaluations of a run as a PNG.

Guarantees: the picture depends on ``metrics.jsonl`` alone, so it can be redrawn at any time; the file is replaced in
one step, never half written. Ticks are whole steps, axes fit what was measured, and a step without a number is a gap.
What was measured on held-out tasks has markers at its steps, with 95% intervals where there are any.
"""

import itertools
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.observe.sinks import read_metrics

Record = dict[str, float]
Points = list[tuple[float, float]]  # step and value
_COLOURS = ("#1f77b4", "#d95f02", "#2a9d5c", "#8e5ea2", "#c23b5a", "#7a7a7a")
_MOST = len(_COLOURS)  # curves of one panel
_FEW = 20  # up to so many points are drawn as points, and not averaged
_TITLE_WIDTH = 90


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Averages each value with the ``window - 1`` values before it; fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, end - window) for end in range(1, len(values) + 1)]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]


def draw_curve(metrics_file: Path, target: Path, title: str) -> bool:
    """Draw the reward (or loss), sampled and held out, above the other metrics.

    Args:
        metrics_file: ``metrics.jsonl`` of the run.
        target: PNG file to write.
        title: Title of the picture.

    Returns:
        Whether the picture was drawn; ``False`` if the run has no records to draw.
    """
    figure = figure_of(read_metrics(metrics_file), title)
    if figure is None:
        return False
    partial = target.with_name(f".{target.stem}.partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(target)
    return True


def figure_of(records: list[Record], title: str) -> Any:
    """Draws the records of a run.

    Args:
        records: One record of metrics for each step, in order.
        title: Title of the picture.

    Returns:
        A matplotlib figure; ``None`` if there is nothing to draw.
    """
    panels = [draw for draw, is_there in _PANELS if is_there(records)]
    if not panels:
        return None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 2.7 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title, _TITLE_WIDTH)), fontsize=13)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, draw in zip(axes, panels, strict=True):
        draw(axis, records)
        axis.grid(alpha=0.25)
        axis.margins(y=0.08)
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, frameon=False)  # covers no curve
    _whole_steps(axes[-1])
    return figure


def _rewards(axis: Any, records: list[Record]) -> None:
    _sampled(axis, _points(records, "reward/mean_drawn"), _COLOURS[0], "sampled in training")
    _held_out(axis, records, "reward", _COLOURS[1], "held-out tasks")
    axis.set_title("reward", fontsize=11, loc="left")
    axis.set_ylabel("mean of an episode")


def _losses(axis: Any, records: list[Record]) -> None:
    _sampled(axis, _points(records, "train/loss"), _COLOURS[0], "of a batch")
    _held_out(axis, records, "loss", _COLOURS[1], "held-out examples")
    axis.set_title("loss", fontsize=11, loc="left")
    axis.set_ylabel("loss")


def _metrics(axis: Any, records: list[Record]) -> None:
    for colour, name in zip(_COLOURS, _names(records)[:_MOST], strict=False):
        _sampled(axis, _points(records, f"metrics/{name}"), colour, name, whole=False)
        label = f"{name}, held out"
        _held_out(axis, records, name, colour, label)
    axis.set_title("metrics: lines sampled in training, markers on held-out tasks", fontsize=11, loc="left")
    axis.set_ylabel("mean")


def _names(records: list[Record]) -> list[str]:
    """Names the metrics beside reward and loss, those of the environment that are evaluated first."""
    sampled = {name.removeprefix("metrics/") for one in records for name in one if name.startswith("metrics/")}
    keys = {name for one in records for name in one if name.startswith("eval/")}
    held_out = {key.removeprefix("eval/").removesuffix("_low") for key in keys if key.endswith("_low")}
    held_out |= {key.removeprefix("eval/") for key in keys if key == "eval/accuracy" or key == "eval/pair_accuracy"}
    found = (sampled | held_out) - {"reward", "loss"}
    return sorted(found, key=lambda name: (name != "accuracy", name not in held_out, name not in sampled, name))


def _points(records: list[Record], key: str) -> Points:
    return [(record["step"], record[key]) for record in records if key in record]


def _sampled(axis: Any, points: Points, colour: str, label: str, *, whole: bool = True) -> None:
    """Plot what each step measured: few points as they are, many with a moving average.

    Args:
        axis: Axis of matplotlib.
        points: Steps and values, in order.
        colour: Colour of the line.
        label: Name in the legend.
        whole: Whether each step is shown beside the average.
    """
    if not points:
        return
    if len(points) <= _FEW:
        axis.plot(*_with_gaps(points), color=colour, linewidth=1.6, marker=".", markersize=7, label=label)
        return
    window = max(3, len(points) // 20)
    smooth = moving_average([value for _, value in points], window)
    averaged = [(step, value) for (step, _), value in zip(points, smooth, strict=True)]
    if whole:
        axis.plot(*_with_gaps(points), color=colour, alpha=0.25, linewidth=0.8, label=f"{label}, each step")
    axis.plot(*_with_gaps(averaged), color=colour, linewidth=2.0, label=f"{label}, mean of {window} steps")


def _held_out(axis: Any, records: list[Record], name: str, colour: str, label: str) -> None:
    """Plot an evaluated metric: a marker at each step where it was measured, with its interval."""
    found = [record for record in records if f"eval/{name}" in record]
    if not found:
        return
    means = [record[f"eval/{name}"] for record in found]
    low = [max(0.0, mean - one.get(f"eval/{name}_low", mean)) for mean, one in zip(means, found, strict=True)]
    high = [max(0.0, one.get(f"eval/{name}_high", mean) - mean) for mean, one in zip(means, found, strict=True)]
    has_interval = any(f"eval/{name}_low" in record for record in found)
    axis.errorbar(
        [record["step"] for record in found],
        means,
        yerr=[low, high] if has_interval else None,
        color=colour,
        linestyle="--",
        linewidth=1.0,
        marker="o",
        markersize=6,
        markeredgecolor="white",
        capsize=3,
        zorder=3,
        label=f"{label}, 95% interval" if has_interval else label,
    )


def _with_gaps(points: Points) -> tuple[list[float], list[float]]:
    """Returns steps and values, with a NaN where steps are missing, so that no line is drawn across."""
    steps: list[float] = []
    values: list[float] = []
    widths = [after - before for (before, _), (after, _) in itertools.pairwise(points)]
    usual = statistics.median(widths) if widths else 1.0
    for number, (step, value) in enumerate(points):
        if number and widths[number - 1] > 1.5 * usual:
            steps.append(step - widths[number - 1] / 2)
            values.append(float("nan"))
        steps.append(step)
        values.append(value)
    return steps, values


def _whole_steps(axis: Any) -> None:
    """Label the common axis with whole steps, from the first to the last one measured."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("trainer step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.margins(x=0.02)
    low, high = axis.get_xlim()
    if high - low < 1.0:  # one step: room beside it
        middle = round((low + high) / 2)
        axis.set_xlim(middle - 1, middle + 1)


def _has(records: list[Record], *keys: str) -> bool:
    return any(key in record for record in records for key in keys)


_PANELS = (
    (_rewards, lambda records: _has(records, "reward/mean_drawn", "eval/reward")),
    (_losses, lambda records: _has(records, "train/loss", "eval/loss") and not _has(records, "reward/mean_drawn")),
    (_metrics, lambda records: bool(_names(records))),
)
