"""Sentences of the live view, against independent numbers."""

import io
import random
from pathlib import Path

import numpy as np
import orjson
import pytest
from rich.console import Console
from scipy import stats

from agentrl.bench.made_run import made_episode
from agentrl.config.load import load_recipe
from agentrl.observe.live import LiveView
from agentrl.observe.live_facts import last_answer, progress, speed, trend, waits


def _steps(count, **more):
    drawn = random.Random(2)
    return [
        {"step": float(at), "reward/mean_drawn": 0.01 * at + drawn.gauss(0, 0.02), "time/step": 10.0, **more}
        for at in range(1, count + 1)
    ]


def test_the_trend_is_that_of_a_regression():
    steps = _steps(12)
    xs, ys = [one["step"] for one in steps], [one["reward/mean_drawn"] for one in steps]
    wanted = stats.linregress(xs, ys)
    half = stats.t.ppf(0.975, 10) * wanted.stderr
    low, high = stats.t.interval(0.95, 11, np.mean(ys), stats.sem(ys))
    assert trend(steps, "reward", "reward/mean_drawn") == (
        f"reward of the last 12 steps {np.mean(ys):.3f} [{low:.3f}, {high:.3f}], a step {wanted.slope:+.4f} "
        f"[{wanted.slope - half:+.4f}, {wanted.slope + half:+.4f}]"
    )
    assert trend(steps[:3], "reward", "reward/mean_drawn") == ""
    assert trend(steps, "loss", "train/loss") == ""


def test_the_time_left_is_bounded_by_the_budget():
    steps = _steps(10)
    assert progress(steps, 100, 100.0, None) == "about 15 min left"
    assert progress(steps, 100, 100.0, 130.0) == "about 30 s left, by the time budget"
    assert progress(steps, 10, 100.0, 130.0) == "about 0 s left"
    assert progress([{"step": 1.0}], 10, 1.0, None) == ""


def test_speeds_are_said_where_they_were_measured():
    record = {"time/step": 10.0, "tokens/completion_total": 5000.0, "time/update": 2.0, "train/tokens": 4000.0,
              "staleness/mean": 0.5, "staleness/max": 2.0}  # fmt: skip
    assert speed(record) == "generation 500 tokens/s · training 2,000 tokens/s · age 0.5, at most 2"
    assert speed({"time/step": 10.0}) == ""


def test_waits_are_one_line_each():
    status = {"waits": [{"process": "trainer", "doing": "waits for the batch", "seconds": 3.2},
                        {"process": "http://x", "doing": "ready, 2 sessions", "seconds": None}]}  # fmt: skip
    assert waits(status) == ["trainer: waits for the batch, for 3 s", "http://x: ready, 2 sessions"]
    assert waits({}) == []


def test_many_servers_share_a_line_and_one_that_differs_has_its_own():
    servers = [{"process": f"http://10.0.0.{n}:1", "doing": f"serves, {n} sessions"} for n in range(1, 9)]
    servers[3]["doing"] = "lost, 4 sessions: it does not answer"
    found = waits({"waits": [{"process": "trainer", "doing": "computes the update", "seconds": 3.0}, *servers]})
    assert found == [
        "trainer: computes the update, for 3 s",
        "7 servers: serves, 32 sessions",
        "http://10.0.0.4:1: lost, 4 sessions: it does not answer",
    ]
    assert len(waits({"waits": servers[:2]})) == 2


def test_the_last_answer_is_one_line_and_obeyed_by_nothing(tmp_path):
    file = tmp_path / "episodes.jsonl"
    assert last_answer(file) == ""
    record = made_episode(1, random.Random(1))
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = "one\ntwo \x1b[2J"
    file.write_bytes(orjson.dumps(record) + b'\n{"half')
    assert last_answer(file) == f"last answer, reward {record['reward']:.3f}: one ⏎ two \\x1b[2J"
    file.write_bytes(b"no json\n")
    assert last_answer(file) == ""


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 24), (120, 40), (200, 60)])
def test_the_panel_fits_with_all_of_it(tmp_path, width, height):
    (tmp_path / "episodes.jsonl").write_bytes(orjson.dumps(made_episode(1, random.Random(1))) + b"\n")
    trainer = {"process": "trainer", "doing": "waits for the batch of step 3: 1 of 4 groups", "seconds": 3.0}
    servers = [{"process": f"http://10.0.0.{n}:30000", "doing": "serves, 12 sessions"} for n in range(4)]
    status = {"waits": [{"process": "controller", "doing": "runs 8 groups, the oldest of draw 4"}, trainer, *servers]}
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, record=True)
    recipe = load_recipe("gsm8k_grpo", device="cpu")
    view = LiveView(recipe, Path(tmp_path), console, clock=lambda: 0.0, status=lambda: status)
    evaluated = {"step": 0.0, "eval/n": 36.0, "eval/invalid": 2.0}
    for name in ("accuracy", "reward", "format", *(f"{kind}{k}" for kind in ("pass@", "maj@") for k in range(1, 9))):
        evaluated |= {
            f"eval/{name}": 0.5,
            f"eval/{name}_low": 0.4,
            f"eval/{name}_high": 0.6,
            f"eval/{name}_if_wrong": 0.3,
        }
    view.update(evaluated)
    for record in _steps(30, **{"tokens/completion_total": 900.0, "metrics/accuracy": 0.5, "staleness/mean": 1.0}):
        view.update(record)
    lines = console.render_lines(view.render(), console.options)
    assert len(lines) <= height
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert "step" in text and "30" in text
    if width >= 80:
        for part in (
            "left",
            "generation 90 tokens/s",
            "waits for the batch",
            "reward of the last 20 steps",
            "age",
            "4 servers: serves, 48 sessions",
            "last answer",
            "accuracy 0.500 [0.400, 0.600]",
            "invalid 2",
        ):
            assert part in text, part
