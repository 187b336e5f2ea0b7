"""docs/python.md: its blocks run as they stand."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.launch import api
from agentrl.launch.results import ExitReason, read_training
from tests.end_to_end import ROOT, environment
from tests.launch.test_api import FIRST, records, url  # noqa: F401 - a fixture

TEXT = (ROOT / "docs" / "python.md").read_text()
TRAIN, OWN, EVALUATE, ERRORS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_training_takes_the_shown_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That such a call trains is shown by the notebook's test."""
    seen: dict[str, Any] = {}
    (tmp_path / "model").mkdir()
    (tmp_path / "eval-000000.json").write_text('{"per_task": {"accuracy": {"a": 0}}}')
    (tmp_path / "eval-000007.json").write_text('{"per_task": {"accuracy": {"a": 1}}}')
    records(tmp_path, FIRST, FIRST.replace('"step": 0', '"step": 7'))

    def trained(recipe: Any, **given: Any) -> agentrl.TrainResult:
        seen.update(recipe=recipe, **given)
        return read_training(tmp_path, ExitReason.TIME_BUDGET)

    monkeypatch.setattr(api, "run_recipe", trained)
    exec(TRAIN, {})
    recipe = seen["recipe"]
    assert (recipe.trainer.learning_rate, recipe.trainer.time_budget, recipe.seed) == (2e-5, 120.0, 1)
    assert (recipe.rollout.group_size, seen["numbered"]) == (16, True)
    assert f"time_budget 7 {tmp_path} {tmp_path}/model" in capsys.readouterr().out


def test_the_shown_script_is_planned_with_its_own_environment(tmp_path: Path) -> None:
    """That such a run trains is shown by README's environment; here the call stops where processes would start."""
    (tmp_path / "mine.py").write_text(OWN)
    told = "import runpy; from agentrl.launch import api; api.run_recipe = lambda recipe, **_: exit(recipe.env.id); "
    ran = subprocess.run(
        [sys.executable, "-c", f"{told} runpy.run_path('mine.py', run_name='__main__')"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1 and ran.stderr.strip().endswith("mine.py:Shout"), ran.stderr


def test_an_api_is_evaluated_as_shown(
    url: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    block = EVALUATE.replace("http://127.0.0.1:8000/v1", url).replace('"gsm8k"', '"arithmetic"')
    assert block.count(url) == 1 and '"arithmetic"' in block
    names: dict[str, Any] = {}
    exec(block, names)
    out = capsys.readouterr().out
    assert "Estimate(mean=" in out and "The answer is 42." in out
    assert (names["result"].evaluation.n, names["result"].run_dir.is_dir()) == (80, True)


def test_the_error_is_the_one_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(ERRORS, {})
    (said,) = re.findall(r"print\(error\)  # (.*)", ERRORS)
    assert capsys.readouterr().out.strip() == said


def test_every_name_and_attribute_of_the_page_exists() -> None:
    for name in re.findall(r"^\| `(\w+)` \| (?:a recipe|a process|Ctrl)", TEXT, re.MULTILINE):
        assert name in agentrl.__all__
    table = TEXT.partition("A `TrainResult` has:")[2].partition("## Evaluate")[0]
    for row in re.findall(r"^\| (`[a-z_`, ]+`) \|", table, re.MULTILINE):
        assert all(one in agentrl.TrainResult.__dataclass_fields__ for one in re.findall(r"\w+", row))
