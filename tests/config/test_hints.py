"""What is probably not meant is said once, with its keys, wherever a recipe is shown or started."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config.hints import hints
from agentrl.config.load import load_recipe
from agentrl.launch import run as run_module
from agentrl.launch.run import run_recipe

SAMPLES = "eval.samples=4"
SAID = "eval.samples=4 with sampling.eval_temperature=0 repeats one greedy answer"


@pytest.mark.parametrize(
    ("settings", "count"),
    [([SAMPLES], 1), ([SAMPLES, "sampling.eval_temperature=0.6"], 0), ([], 0), ([SAMPLES, "trainer.type=null"], 1)],
)
def test_greedy_samples_of_one_task_are_a_hint(settings: list[str], count: int) -> None:
    found = hints(load_recipe("arithmetic_grpo", settings, device="cpu"))
    assert len(found) == count and all(SAID in one for one in found)


@pytest.mark.parametrize(
    "command", [["recipe", "show", "arithmetic_grpo"], ["recipe", "run", "--dry-run", "arithmetic_grpo"]]
)
def test_a_recipe_is_shown_with_its_hints(command: list[str]) -> None:
    assert CliRunner().invoke(app, [*command, SAMPLES]).output.count(SAID) == 1
    assert SAID not in CliRunner().invoke(app, command).output


def test_a_run_says_its_hints_once_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "train_recipe", lambda *given, **more: "done")
    monkeypatch.setattr(run_module, "evaluate_recipe", lambda *given, **more: "done")
    for name, kind in (("trained", "grpo"), ("evaluated", "null")):
        out = io.StringIO()
        chosen = [SAMPLES, f"launch.run_dir={tmp_path}", f"name={name}", f"trainer.type={kind}"]
        recipe = load_recipe("arithmetic_grpo", chosen, device="cpu")
        assert run_recipe(recipe, resume=False, console=Console(file=out, width=400)) == "done"
        assert out.getvalue().count(SAID) == 1


def test_reserving_the_only_server_is_told() -> None:
    single = hints(load_recipe("arithmetic_grpo", ["eval.on_push=reserve"], device="cpu"))
    assert any("inference.servers=2, or eval.on_push=wait" in hint for hint in single)
    for more in (["inference.servers=2"], ["inference.urls=[http://a,http://b]"], ["trainer.type=null"]):
        assert hints(load_recipe("arithmetic_grpo", ["eval.on_push=reserve", *more], device="cpu")) == []


def test_workers_of_an_evaluation_alone_get_a_hint() -> None:
    settings = ["rollout.workers=2"]
    assert hints(load_recipe("arithmetic_grpo", settings)) == []
    (hint,) = hints(load_recipe("arithmetic_grpo", [*settings, "trainer.type=null"]))
    assert "rollout.workers=2 does nothing with trainer.type=null" in hint


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ([], ["args"]),
        (["launch.slurm.args=[-p gpu, -c 32]"], []),
        (["launch.slurm.args=[--exclusive]"], []),
        (["launch.slurm.args=[--cpus-per-gpu=12]", "launch.slurm.server_args=[-p l40]"], ["server_args"]),
        (["launch.slurm.args=[--exclusive]", "launch.slurm.worker_args=[--cpus-per-task=32]"], []),
    ],
)
def test_a_job_whose_options_say_nothing_of_cpus_is_told(settings: list[str], keys: list[str]) -> None:
    nodes = ["inference.nodes=1", "rollout.nodes=1", "rollout.workers=1"]
    found = hints(load_recipe("arithmetic_grpo", ["launch.type=slurm", *nodes, *settings], device="cpu"))
    assert [one.partition(" ")[0] for one in found] == [f"launch.slurm.{key}" for key in keys]
    assert hints(load_recipe("arithmetic_grpo", [], device="cpu")) == []
