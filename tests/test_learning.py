"""Learning runs with the real 135M model: ``make test-long``. They take some ten minutes each on two cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.new_env import write_environment
from agentrl.evaluate.paired import changes
from agentrl.observe.examine_run import examine
from tests.end_to_end import ROOT, command, environment
from tests.sight import teach
from tests.tiny_vision import build_tiny_vision

pytestmark = pytest.mark.long
SECONDS = 1500  # deadline of one run on a slow machine


def train(
    recipe: str, runs: Path, name: str, *overrides: str, cwd: Path = ROOT, healthy: bool = True
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run a recipe as a user would; evaluation before, after, and what was printed. A healthy run warns of nothing."""
    arguments = ["recipe", "run", recipe, f"name={name}", f"launch.run_dir={runs}", *overrides]
    own = {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}
    result = subprocess.run(
        command(*arguments), cwd=cwd, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert not healthy or "warning, step" not in result.stdout, result.stdout
    assert [finding.kind for finding in examine(runs / name)[0] if finding.level == "warning"] == []
    (runs / name / "output.txt").write_text(result.stdout)
    evaluations = sorted((runs / name).glob("eval-[0-9]*.json"))
    before, after = (json.loads(p.read_text()) for p in (evaluations[0], evaluations[-1]))
    return before, after, result.stdout


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_are_learned(seed: int, tmp_path: Path) -> None:
    before, after, _ = train("arithmetic_grpo", tmp_path, f"seed-{seed}", f"seed={seed}")
    assert after["eval/accuracy"] > 0.8 > before["eval/accuracy_high"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_env_new_writes_is_learned(seed: int, tmp_path: Path) -> None:
    write_environment("my_shop", tmp_path)
    before, after, _ = train("my_shop_grpo", tmp_path / "runs", "shop", f"seed={seed}", cwd=tmp_path)
    assert before["eval/accuracy"] < 0.2 and after["eval/accuracy"] > 0.8


def test_gsm8k_gains_the_answer_format_and_goes_on_reasoning(tmp_path: Path) -> None:
    before, after, output = train("gsm8k_grpo", tmp_path, "gsm8k")
    steps = [json.loads(line) for line in (tmp_path / "gsm8k" / "metrics.jsonl").read_text().splitlines()]
    lengths = [step["tokens/completion_mean"] for step in steps if "tokens/completion_mean" in step]
    assert min(lengths[-3:]) > 20, "answers are more than their last line"
    gain = changes(before["per_task"], after["per_task"])["format"]  # of the same tasks
    assert gain.low > 0, "the gain is within the noise"
    assert "test accuracy" in output and "format rate" in output


def test_the_calculator_is_called_and_its_result_repeated(tmp_path: Path) -> None:
    before, after, _ = train("calculator_grpo", tmp_path, "calculator")
    assert after["eval/tool_used_low"] > before["eval/tool_used_high"], "the gain is within the noise"
    assert after["eval/reward_low"] > before["eval/reward_high"], "the gain is within the noise"


def test_the_reward_rises_on_a_tiny_random_model_that_sees(tmp_path: Path) -> None:
    folder = build_tiny_vision(tmp_path / "model")
    settings = (f"model.name={folder}", *TINY_SHAPES)
    before, after, _ = train("shapes_grpo", tmp_path, "shapes", *settings, healthy=False)  # its limit is one token
    assert after["eval/reward_low"] > before["eval/reward_high"], "the gain is within the noise"


def test_what_is_seen_is_answered_better_than_a_player_without_eyes_could(tmp_path: Path) -> None:
    """A tiny model that was shown a few thousand answers, and then learns more from rewards alone.

    One that answers half of the questions gained next to nothing in 250 steps of 8 tasks, so noisy are they.
    """
    shown, blind = teach(tmp_path / "model")
    settings = (f"model.name={tmp_path / 'model'}", *TINY_SHAPES, "rollout.batch_size=16", "trainer.total_steps=200")
    before, after, _ = train("shapes_grpo", tmp_path, "sight", *settings)
    assert shown < 0.75 and blind < 0.4
    assert after["eval/accuracy_low"] > blind
    assert changes(before["per_task"], after["per_task"])["accuracy"].low > 0, "the gain is within the noise"


TINY_SHAPES = (
    "launch.device=cpu", "env.kwargs={size: 16, short: true}", "train_dataset.name=shapes", "valid_dataset.name=shapes",
    "train_dataset.kwargs={ask: color}", "valid_dataset.kwargs={ask: color}", "sampling.max_new_tokens=1",
    "inference.context_length=256", "inference.dtype=float32", "inference.threads=1", "rollout.batch_size=8",
    "rollout.group_size=16", "rollout.max_staleness=0", "trainer.dtype=float32", "trainer.threads=1",
    "trainer.freeze=[]", "trainer.total_steps=100", "trainer.learning_rate=1e-3", "trainer.schedule=linear",
    "trainer.tokens_per_microbatch=8192", "eval.every=0", "eval.tasks=200",
)  # fmt: skip


@pytest.mark.parametrize("name", ["client", "engine", "episodes", "weights"])
def test_benchmarks_print_one_line_of_json(name: str) -> None:
    output = subprocess.check_output(
        [sys.executable, "-m", "agentrl", "bench", name, "--json"], text=True, timeout=SECONDS, env=dict(os.environ)
    )
    figures = json.loads(output.splitlines()[-1])
    key = {
        "client": "cpu_vs_openai",
        "engine": "decode_vs_generate",
        "episodes": "episodes_vs_gather",
        "weights": "push_seconds",
    }[name]
    assert figures[key]["n"] >= 5
    assert figures[key]["min"] <= figures[key]["median"] <= figures[key]["max"]
