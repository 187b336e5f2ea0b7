"""The report at the end of a run: the evaluations before and after, compared task by task."""

import io
import json
from pathlib import Path

from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.launch.results import ExitReason, read_training
from agentrl.launch.run import _report

SETUP = {"temperature": 0.0, "max_new_tokens": 9, "tasks": 4, "samples": 1}


def write(folder: Path, step: int, values: list[float], *, beside: bool = True) -> None:
    mean = sum(values) / len(values)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "eval/accuracy": mean, "eval/n": len(values), "eval/invalid": 0}) + "\n")
        file.write(json.dumps({"step": step + 1, "train/loss": 0.5}) + "\n")
    if beside:
        per_task = {"accuracy": {f"test/{index}": value for index, value in enumerate(values)}}
        (folder / f"eval-{step:06d}.json").write_text(json.dumps({"setup": SETUP, "per_task": per_task}))


def report(folder: Path) -> str:
    out = io.StringIO()
    result = read_training(folder, ExitReason.TOTAL_STEPS, seconds=60.0)
    _report(load_recipe("arithmetic_grpo", device="cpu"), result, Console(file=out, width=160))
    return " ".join(out.getvalue().split())


def test_the_first_and_the_last_evaluation_are_compared_over_the_same_tasks(tmp_path: Path) -> None:
    write(tmp_path, 0, [0.0, 0.0, 1.0, 0.0])
    write(tmp_path, 5, [0.0, 0.0, 0.0, 0.0])
    write(tmp_path, 9, [1.0, 0.0, 1.0, 1.0])
    text = report(tmp_path)
    assert "change, paired [95% interval]" in text and "+50.0 points [" in text
    assert "change: 4 tasks judged both times; greedy (temperature 0), up to 9 tokens an answer" in text


def test_without_values_of_tasks_nothing_is_compared(tmp_path: Path) -> None:
    write(tmp_path, 0, [0.0, 1.0], beside=False)
    write(tmp_path, 9, [1.0, 1.0])
    text = report(tmp_path)
    assert "50.0% (no interval)" in text and "paired" not in text
