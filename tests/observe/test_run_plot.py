"""The picture of several runs: what is drawn, against the numbers."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config.errors import UserError
from agentrl.observe.run_plot import Curve, chosen, draw, figure_of


def _records(values, start=1, **more):
    return [{"step": float(at), "time": 0.0, "a": value, **more} for at, value in enumerate(values, start)]


def test_seeds_are_a_mean_with_a_band_over_the_steps_that_all_have():
    curve = Curve("runs", [_records([1.0, 2.0, 3.0]), _records([3.0, 6.0]), [{"step": 1.0, "b": 1.0}]])
    assert curve.band("a") == ([1.0, 2.0], [2.0, 4.0], [1.0, 2.0], [3.0, 6.0])
    axis = figure_of([curve], ["a"]).axes[0]
    assert axis.lines[0].get_ydata().tolist() == [2.0, 4.0]
    band = axis.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1.0, 6.0)
    assert "3 seeds" in axis.get_legend().get_texts()[0].get_text()


def test_the_moving_average_is_of_each_seed():
    curve = Curve("run", [_records([0.0, 2.0, 4.0])])
    assert curve.band("a", smooth=2)[1] == [0.0, 1.0, 3.0]
    evaluated = Curve("run", [[{"step": one["step"], "eval/a": one["a"]} for one in _records([0.0, 2.0, 4.0])]])
    assert evaluated.band("eval/a", smooth=2)[1] == [0.0, 2.0, 4.0], "each is a measurement of its own"


def test_over_minutes_each_run_begins_with_its_first_record():
    slow = [{"step": float(step), "time": 1000.0 + 120 * step, "a": float(step)} for step in range(4)]
    quick = [{"step": float(step), "time": 7000.0 + 60 * step, "a": float(step)} for step in range(4)]
    assert Curve("slow", [slow]).band("a", minutes=True)[:2] == ([0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0])
    axis = figure_of([Curve("slow", [slow]), Curve("quick", [quick])], ["a"], minutes=True).axes[0]
    assert [line.get_xdata().tolist() for line in axis.lines] == [[0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0]]
    assert "minutes" in axis.get_xlabel()
    evaluated = [one | {"eval/a": 0.5, "eval/a_low": 0.4, "eval/a_high": 0.7} for one in slow]
    bars = figure_of([Curve("slow", [evaluated])], ["eval/a"], minutes=True).axes[0].collections[0].get_segments()
    assert [segment[0, 0] for segment in bars] == [0.0, 2.0, 4.0, 6.0]


def test_over_minutes_seeds_are_interpolated_as_far_as_all_were_measured():
    slow = [{"step": float(step), "time": 120.0 * step, "a": float(step)} for step in range(1, 4)]
    quick = [{"step": float(step), "time": 60.0 * step, "a": 2.0 * step} for step in range(4)]
    curve = Curve("runs", [[{"step": 0.0, "time": 0.0}, *slow], quick])
    assert curve.band("a", minutes=True) == ([2.0, 3.0], [2.5, 3.75], [1.0, 1.5], [4.0, 6.0])


def test_a_step_without_a_number_is_a_gap():
    records = [one for one in _records([1.0] * 6) if one["step"] != 4]
    line = figure_of([Curve("run", [records])], ["a"]).axes[0].lines[0]
    assert np.isnan(line.get_ydata()).sum() == 1


def test_intervals_of_an_evaluation_are_drawn():
    records = [{"step": 0.0, "eval/a": 0.5, "eval/a_low": 0.4, "eval/a_high": 0.7}]
    axis = figure_of([Curve("run", [records])], ["eval/a"]).axes[0]
    segment = axis.collections[0].get_segments()[0]
    assert segment[:, 1].tolist() == pytest.approx([0.4, 0.7])


def test_runs_side_by_side_have_one_scale():
    curves = [Curve("one", [_records([0.0, 1.0])]), Curve("other", [_records([5.0, 9.0])])]
    left, right = figure_of(curves, ["a"], apart=True).axes
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[1] > 9.0


def test_a_metric_that_no_run_has_is_refused_with_what_there_is():
    with pytest.raises(UserError, match="no run has the metric 'aa', did you mean 'a'"):
        chosen([Curve("run", [_records([1.0])])], ["aa"])
    with pytest.raises(UserError, match="no metric yet"):
        chosen([Curve("run", [[{"step": 1.0, "time": 0.0}]])], [])


def test_both_formats_are_written_and_are_the_same_each_time(tmp_path):
    curve = Curve("run", [_records([1.0, 2.0])])
    files = [tmp_path / "c.png", tmp_path / "c.svg"]
    draw([curve], ["a"], files)
    first = [file.read_bytes() for file in files]
    draw([curve], ["a"], files)
    assert [file.read_bytes() for file in files] == first
    assert first[0].startswith(b"\x89PNG") and b"<svg" in first[1]
    with pytest.raises(UserError, match="neither PNG nor SVG"):
        draw([curve], ["a"], [tmp_path / "c.pdf"])
    with pytest.raises(UserError, match="cannot be written"):
        draw([curve], ["a"], [tmp_path / "no" / "c.png"])


def _run(folder, seed, values, **settings):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": folder.name, "seed": seed, **settings}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in _records(values)))


def test_the_command_groups_seeds_and_names_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        _run(tmp_path / "runs" / f"mine-{seed}", seed, [1.0, 2.0 + seed], trainer={"rate": 1})
    _run(tmp_path / "runs" / "faster", 0, [1.0], trainer={"rate": 2})
    result = CliRunner().invoke(app, ["plot", "mine-0", "mine-1", "faster", "-m", "a"])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == "curves.png, curves.svg: a of mine-0, faster"
    assert b"2 seeds" in (tmp_path / "curves.svg").read_bytes() or (tmp_path / "curves.svg").stat().st_size > 1000
    listed = CliRunner().invoke(app, ["plot", "faster", "--list"])
    assert listed.output.strip() == "a"
