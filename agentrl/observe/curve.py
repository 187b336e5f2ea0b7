"""Draws the reward and evaluation curves of a run as a PNG.

Guarantees: the picture depends on ``metrics.jsonl`` alone, so it can be redrawn at any time; the file is replaced in
one step, never half written; evaluation points have their 95% intervals.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.observe.sinks import read_metrics

Record = dict[str, float]
_COLOURS = ("#1f77b4", "#d95f02", "#2a9d5c", "#8e5ea2", "#c23b5a", "#7a7a7a")


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Averages each value with the ``window - 1`` values before it; fewer at the start."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]


def draw_curve(metrics_file: Path, target: Path, title: str) -> bool:
    """Draw the training reward (or loss) above and the evaluation below.

    Args:
        metrics_file: ``metrics.jsonl`` of the run.
        target: PNG file to write.
        title: Title of the picture.

    Returns:
        Whether the picture was drawn; ``False`` if the run has no records to draw.
    """
    records = read_metrics(metrics_file)
    training = [record for record in records if "reward/mean_drawn" in record]
    losses = [] if training else [record for record in records if "train/loss" in record or "eval/loss" in record]
    shares = ("eval/n", "eval/accuracy", "eval/pair_accuracy")
    evaluations = [record for record in records if any(name in record for name in shares)]
    if not training and not evaluations and not losses:
        return False

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    rows: list[tuple[Any, list[Record]]] = [
        (part, found) for part, found in ((_training, training), (_losses, losses), (_evaluation, evaluations)) if found
    ]
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (part, found) in zip(axes, rows, strict=True):
        part(axis, found)
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:  # an evaluation in which all episodes failed has no lines
            axis.legend(loc="best", fontsize=9, framealpha=0.8)
    axes[-1].set_xlabel("trainer step")
    partial = target.with_name(f".{target.stem}.partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(target)
    return True


def _training(axis: Any, records: list[Record]) -> None:
    steps = [record["step"] for record in records]
    rewards = [record["reward/mean_drawn"] for record in records]
    window = max(3, len(records) // 10)
    axis.plot(
        steps,
        rewards,
        color=_COLOURS[0],
        alpha=0.25,
        linewidth=1,
        label="reward, mean of all episodes drawn for a step",
    )
    axis.plot(
        steps,
        moving_average(rewards, window),
        color=_COLOURS[0],
        linewidth=2.2,
        label=f"reward, mean of {window} steps",
    )
    names = sorted({name for record in records for name in record if name.startswith("metrics/")})
    for colour, name in zip(_COLOURS[1:], names, strict=False):
        found = [(record["step"], record[name]) for record in records if name in record]
        smooth = moving_average([value for _, value in found], window)
        label = f"{name.removeprefix('metrics/')}, mean of {window} steps"
        axis.plot([step for step, _ in found], smooth, color=colour, linewidth=1.4, label=label)
    axis.set_title("training (sampled)", fontsize=10)
    axis.set_ylabel("per episode")


def _losses(axis: Any, records: list[Record]) -> None:
    """Plot the loss of each batch, and of the held-out examples."""
    steps = [record["step"] for record in records if "train/loss" in record]
    values = [record["train/loss"] for record in records if "train/loss" in record]
    window = max(3, len(values) // 10)
    axis.plot(steps, values, color=_COLOURS[0], alpha=0.25, linewidth=1, label="loss of a batch")
    label = f"loss, mean of {window} steps"
    axis.plot(steps, moving_average(values, window), color=_COLOURS[0], linewidth=2.2, label=label)
    held_out = [record for record in records if "eval/loss" in record]
    points = [record["eval/loss"] for record in held_out]
    label = "loss of the held-out examples"
    axis.plot([r["step"] for r in held_out], points, color=_COLOURS[1], marker="o", label=label)
    axis.set_title("training", fontsize=10)
    axis.set_ylabel("loss")


def _evaluation(axis: Any, records: list[Record]) -> None:
    names = ["accuracy", *sorted(_evaluated(records) - {"accuracy"})]
    for colour, name in zip(_COLOURS[1:], names, strict=False):
        found = [record for record in records if f"eval/{name}" in record]
        if not found:
            continue
        means = [record[f"eval/{name}"] for record in found]
        low = [max(0.0, mean - record.get(f"eval/{name}_low", mean)) for mean, record in zip(means, found, strict=True)]
        high = [
            max(0.0, record.get(f"eval/{name}_high", mean) - mean) for mean, record in zip(means, found, strict=True)
        ]
        axis.errorbar(
            [record["step"] for record in found],
            means,
            yerr=[low, high],
            color=colour,
            marker="o",
            markersize=4,
            capsize=3,
            label=f"{name}, 95% interval",
        )
    axis.set_ylim(-0.03, 1.03)
    axis.set_title("evaluation on held-out tasks", fontsize=10)
    axis.set_ylabel("share of answers")


def _evaluated(records: list[Record]) -> set[str]:
    """Names the metrics that have an interval, except the reward, which has a panel of its own."""
    names = {name for record in records for name in record if name.startswith("eval/") and name.endswith("_low")}
    return {name.removeprefix("eval/").removesuffix("_low") for name in names} - {"reward"}
