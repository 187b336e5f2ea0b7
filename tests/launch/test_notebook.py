"""The example notebook runs from its first cell to its last, on the tiny model and in a running event loop."""

import json
import subprocess
import sys
from pathlib import Path

from agentrl.config.overrides import parse_override
from tests.end_to_end import ROOT, environment, overrides, processes_of

NOTEBOOK = ROOT / "docs" / "notebooks" / "python_api.ipynb"
SECONDS = 600  # it takes about 60 on two idle cores
CHECKS = """
from pathlib import Path

assert before.evaluation.n == 4 == len(before.episodes) and before.evaluation.failed == 0
assert before.episodes[0].conversation()[-1]["role"] == "assistant"
assert 0 <= before.evaluation["accuracy"].low <= before.evaluation["accuracy"].high <= 1
assert len(before.evaluation.per_task["accuracy"]) == 4 and before.data
assert (result.exit_reason, result.steps, result.error) == ("total_steps", 3, None)
assert (result.before.step, result.after.step) == (0, 3) and result.changes["reward"].tasks == 4
assert result.model == Path("runs/arithmetic_grpo/model") and (result.model / "model.safetensors").is_file()
assert [record["step"] for record in result.metrics] == [0, 1, 2, 3]
assert after.run_dir.is_dir() and after.evaluation.n == 4
"""


def test_the_notebook_runs_in_a_running_loop(tiny_model: Path, tmp_path: Path) -> None:
    settings = dict(parse_override(one) for one in overrides(tiny_model, Path("runs"), "x"))
    for key in ("name", "launch.run_dir", "env.id", "model.name", "eval.tasks"):
        del settings[key]
    parameters = f"model, tasks, settings, seconds = {str(tiny_model)!r}, 4, {settings!r}, None"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.notebook", str(NOTEBOOK), json.dumps([parameters, CHECKS])],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "did you mean 'trainer.learning_rate'" in ran.stdout
    assert processes_of(tmp_path) == []
