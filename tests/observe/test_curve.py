"""The pictures of runs: what their axes, ticks and curves show."""

import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.curve import draw_curve, figure_of, moving_average
from agentrl.observe.sinks import MetricsWriter, read_metrics

EVALUATED = {"accuracy": 0.5, "reward": 0.75}


def step_record(step: int, reward: float, **more: float) -> dict[str, float]:
    """A record of training."""
    return {"step": step, "reward/mean_drawn": reward, "metrics/accuracy": reward / 2, "train/loss": 0.1, **more}


def evaluation(half: float = 0.0625) -> dict[str, float]:
    """An evaluation with intervals."""
    found = {f"eval/{name}": value for name, value in EVALUATED.items()}
    found |= {f"eval/{name}_low": value - half for name, value in EVALUATED.items()}
    return found | {f"eval/{name}_high": value + half for name, value in EVALUATED.items()} | {"eval/n": 64.0}


def run_of(steps: int, every: int | None) -> list[dict[str, float]]:
    """Records of a run of some steps with an evaluation before, every few steps and after."""
    records: list[dict[str, float]] = [{"step": 0, **evaluation()}] if every else []
    for step in range(1, steps + 1):
        evaluated = every and (step % every == 0 or step == steps)
        records.append(step_record(step, 0.25 + 0.5 * step / steps, **(evaluation() if evaluated else {})))
    return records


def labels_of(axis: Any) -> list[str]:
    """Names in a panel's legend."""
    return [text.get_text() for text in axis.get_legend().get_texts()]


def inside(axis: Any) -> list[float]:
    """Ticks that are shown."""
    low, high = axis.get_xlim()
    return [tick for tick in axis.get_xticks() if low <= tick <= high]


@pytest.mark.parametrize("steps", [1, 2, 3, 60, 10_000])
@pytest.mark.parametrize("every", [None, 1000, 1])
def test_axes_fit_the_data_and_ticks_are_whole_steps(steps: int, every: int | None) -> None:
    if steps == 10_000 and every == 1:
        every = 500
    figure = figure_of(run_of(steps, every), "a run")
    reward, metrics = figure.axes
    assert all(float(tick).is_integer() for tick in inside(reward)) and 1 <= len(inside(reward)) <= 13
    assert len(set(inside(reward))) == len(inside(reward))
    first = 0 if every else 1
    low, high = reward.get_xlim()
    room = max(1.0, 0.05 * steps)
    assert first - room <= low <= first and steps <= high <= steps + room
    for axis, numbers in ((reward, [0.25 + 0.5 / steps, 0.75]), (metrics, [0.125 + 0.25 / steps, 0.375])):
        name = "reward" if axis is reward else "accuracy"
        if every:
            numbers += [EVALUATED[name] - 0.0625, EVALUATED[name] + 0.0625]
        low, high = axis.get_ylim()
        span = max(max(numbers) - min(numbers), 0.25)
        assert min(numbers) - 0.2 * span <= low <= min(numbers) <= max(numbers) <= high <= max(numbers) + 0.2 * span


def test_held_out_rewards_stand_beside_sampled_ones_with_their_intervals() -> None:
    reward, metrics = figure_of(run_of(60, 20), "a run").axes
    assert labels_of(reward) == [
        "sampled in training, each step",
        "sampled in training, mean of 3 steps",
        "held-out tasks, 95% interval",
    ]
    (bars,) = reward.containers
    line, _, (intervals,) = bars
    assert line.get_marker() == "o" and list(line.get_xdata()) == [0, 20, 40, 60]
    assert list(line.get_ydata()) == [0.75] * 4
    ends = [sorted(point[1] for point in path.vertices) for path in intervals.get_paths()]
    assert ends == [pytest.approx([0.6875, 0.8125])] * 4
    assert labels_of(metrics) == ["accuracy, mean of 3 steps", "accuracy, held out, 95% interval"]


def test_without_intervals_the_markers_stay() -> None:
    records = [{"step": 0, "eval/reward": 0.25, "eval/n": 4.0}, step_record(1, 0.5), {"step": 2, "eval/reward": 0.5}]
    (reward, *_) = figure_of(records, "a run").axes
    assert labels_of(reward) == ["sampled in training", "held-out tasks"]


def test_a_step_without_a_number_is_a_gap(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(1, 11):
        if step != 4:
            writer.write(step, step_record(step, math.nan if step == 7 else 0.5))
    writer.close()
    reward, *_ = figure_of(read_metrics(tmp_path / "metrics.jsonl"), "a run").axes
    (line,) = reward.lines
    values = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert [step for step, value in values.items() if math.isnan(value)] == [4.0, 7.0]
    assert len(values) == 10


def test_records_that_are_always_far_apart_are_joined() -> None:
    (loss,) = figure_of([{"step": step, "train/loss": 1.0} for step in range(10, 60, 10)], "a run").axes
    assert list(loss.lines[0].get_xdata()) == [10, 20, 30, 40, 50]


def test_a_supervised_run_shows_its_losses_and_what_its_model_earns() -> None:
    records = [{"step": 0, **evaluation()}, {"step": 1, "train/loss": 2.0, "eval/loss": 2.5}]
    titles = [axis.get_title(loc="left") for axis in figure_of(records, "a run").axes]
    assert titles[:2] == ["reward", "loss"]


def test_a_long_title_is_folded() -> None:
    title = figure_of(run_of(2, None), "a name of many words " * 10).get_suptitle()
    assert "\n" in title and max(map(len, title.split("\n"))) <= 90


def test_the_moving_average_is_trailing() -> None:
    assert moving_average([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_a_curve_is_drawn_from_training_and_evaluation(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for record in run_of(4, 2):
        writer.write(int(record["step"]), {name: value for name, value in record.items() if name != "step"})
    writer.close()
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "reward.png", "a run")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.png")] == ["reward.png"]


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert not draw_curve(tmp_path / "metrics.jsonl", tmp_path / "reward.png", "a run")
    assert not (tmp_path / "reward.png").exists()
    assert figure_of([{"step": 0, "eval/n": 0.0, "eval/invalid": 4.0}], "all episodes failed") is None
