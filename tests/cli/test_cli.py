import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from agentrl import __version__
from agentrl.cli import bench as bench_command
from agentrl.cli.main import main
from agentrl.config.env_recipe import recipe_of
from agentrl.config.load import load_recipe, validate
from agentrl.config.yaml12 import read_yaml
from agentrl.launch import api
from agentrl.launch.evaluated import evaluated, how
from agentrl.launch.results import EvalResult, Evaluation, ExitReason, RunFailed, RunStopped, TrainResult


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"agentrl {__version__}\n"


def test_help_lists_the_commands(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in ("recipe", "eval", "serve", "bench"))


def test_recipes_are_listed(capsys):
    assert run("recipe", "list") == 0
    assert "gsm8k_grpo" in capsys.readouterr().out


def test_brackets_in_a_list_are_shown_as_they_are(capsys, tmp_path, monkeypatch):
    (tmp_path / "envs").mkdir()
    source = (
        'from agentrl import LanguageEnvironment\n\n\nclass Tagged(LanguageEnvironment):\n    "Writes [b] and [/i]."\n'
    )
    (tmp_path / "envs" / "tagged.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    assert run("env", "list") == 0
    assert "Writes [b] and [/i]." in capsys.readouterr().out


def test_a_shown_recipe_loads_again(capsys):
    assert run("recipe", "show", "arithmetic_grpo", "seed=3") == 0
    shown = validate(read_yaml(capsys.readouterr().out, "output"))
    assert shown == load_recipe("arithmetic_grpo", ["seed=3"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("recipe", "run", "gsm8k_gpro"), "did you mean 'gsm8k_grpo'"),
        (("recipe", "run", "gsm8k_grpo", "trainer.lerning_rate=1"), "did you mean 'trainer.learning_rate'"),
        (("recipe", "run", "gsm8k_grpo", "--config", "no.yaml"), "cannot read no.yaml"),
        (("recipe", "show", "gsm8k_grpo", "inference.engine=wrong"), "Known: embedded, openai, sglang, vllm"),
        (("eval", "gsm8"), "did you mean 'gsm8k'"),
        (("eval", "gsm8k", "--base-url", "http://h/v1"), "--base-url needs --model"),
        (("bench", "nothing"), "no benchmark 'nothing'"),
    ],
)
def test_a_users_error_is_one_message_and_code_2(capsys, argv, words):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("agentrl: ")
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_dry_run_prints_configuration_and_plan(capsys, tmp_path):
    assert run("recipe", "run", "arithmetic_grpo", "--dry-run", f"model.name={_tiny_config(tmp_path)}") == 0
    out = capsys.readouterr().out
    assert "learning_rate" in out
    assert "trainer rank" in out
    assert "memory     for" in out


def _tiny_config(folder):
    config = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 16}))
    return folder


def test_eval_options_become_settings(monkeypatch, tmp_path):
    seen = {}
    none_judged = EvalResult(tmp_path, Evaluation(0, n=0, failed=36, estimates={}))
    monkeypatch.setattr(api, "run_recipe", lambda recipe, **kwargs: seen.update(recipe=recipe) or none_judged)
    options = ["--base-url", "http://h/v1", "--model", "some-model", "--n", "9", "--k", "4"]
    assert run("eval", "gsm8k", *options, "--output", str(tmp_path / "out"), "sampling.max_new_tokens=77") == 1
    recipe = seen["recipe"]
    assert recipe.trainer.type is None
    assert (recipe.inference.engine, recipe.inference.urls) == ("openai", ("http://h/v1",))
    assert recipe.inference.model == "some-model"
    assert (recipe.eval.tasks, recipe.eval.samples, recipe.sampling.eval_temperature) == (9, 4, 1.0)
    assert recipe.sampling.max_new_tokens == 77
    assert (recipe.launch.run_dir, recipe.name) == (str(tmp_path), "out")


def test_eval_of_one_sample_stays_greedy():
    assert not any("temperature" in key for key, _ in how(None, None, 3, 1, has_recipe=True))


@pytest.mark.parametrize("command", [("recipe", "run", "arithmetic_grpo"), ("eval", "arithmetic")])
@pytest.mark.parametrize(
    ("raised", "code", "shown"),
    [(RunFailed("server-0 exited with code 3", None), 1, "server-0 exited"), (RunStopped("stopped", None), 130, "")],
)
def test_a_run_that_failed_or_was_stopped_ends_with_its_code_and_no_traceback(
    monkeypatch, capsys, command, raised, code, shown
):
    def end(recipe, **kwargs):
        raise raised

    monkeypatch.setattr(api, "run_recipe", end)
    assert run(*command) == code
    captured = capsys.readouterr()
    assert shown in captured.out and "Traceback" not in captured.err


def test_a_finished_training_ends_with_code_0(monkeypatch, tmp_path):
    done = TrainResult(tmp_path, ExitReason.TOTAL_STEPS, steps=1, seconds=1.0)
    monkeypatch.setattr(api, "run_recipe", lambda recipe, **kwargs: done)
    assert run("recipe", "run", "arithmetic_grpo") == 0


def test_a_training_that_saved_and_stopped_ends_with_the_code_to_run_it_again(monkeypatch, tmp_path):
    saved = TrainResult(tmp_path, ExitReason.SAVED, steps=1, seconds=1.0)
    monkeypatch.setattr(api, "run_recipe", lambda recipe, **kwargs: saved)
    assert run("recipe", "run", "arithmetic_grpo") == 75


def test_each_benchmark_module_is_a_benchmark():
    modules = [importlib.import_module(f"agentrl.bench.bench_{name}") for name in bench_command.benchmark_names()]
    assert len(modules) >= 9
    assert all(callable(module.run) for module in modules)


def test_bench_prints_one_json_line(monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "benchmark_names", lambda: ["fake"])
    monkeypatch.setitem(sys.modules, "agentrl.bench.bench_fake", SimpleNamespace(run=lambda: {"x": [1.0, 2.0]}))
    assert run("bench", "fake", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"x": {"median": 1.5, "min": 1.0, "max": 2.0, "n": 2}}


def test_an_environment_is_evaluated_as_it_is_trained():
    """Not as a recipe that learns from lines has it, though its name comes first."""
    assert recipe_of("gsm8k") == "gsm8k_grpo"
    assert evaluated("gsm8k") == evaluated("GSM8K-v0") == ("gsm8k_grpo", [])
    assert evaluated("gsm8k_sft") == ("gsm8k_sft", [])
    assert evaluated("retry") == (None, [("env.id", "retry")]), "it has no recipe"
