"""``agentrl.train`` and ``agentrl.evaluate`` in scripts and beside a running event loop."""

import asyncio
import inspect
import math
import pydoc
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

import agentrl
import agentrl.envs.arithmetic
import agentrl.evaluate.metrics
import agentrl.train.loss
from agentrl import Message, SingleTurnEnvironment
from agentrl.launch import api
from agentrl.launch.results import Evaluation, ExitReason, TrainResult, end_of, read_training
from tests.end_to_end import environment, processes_of


class Echo(SingleTurnEnvironment):
    """The answer must hold a number; one row has none, and its reward is missing."""

    dataset: ClassVar = {"train": [{"n": "42"}], "test": [{"n": "42"}, {"n": "41"}, {"n": ""}]}

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": f"Say {task['n']}"}]

    def judge(self, task: dict[str, Any], answer: str) -> float | None:
        return float(task["n"] in answer) if task["n"] else None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An API that answers everything with 42, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.bench.instant_server"], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    yield f"{process.stdout.readline().strip()}/v1"
    process.terminate()
    process.communicate()


def test_packages_of_the_same_name_stay_packages() -> None:
    assert callable(agentrl.train) and agentrl.train.loss is sys.modules["agentrl.train.loss"]
    assert callable(agentrl.evaluate) and agentrl.evaluate.metrics is sys.modules["agentrl.evaluate.metrics"]
    assert list(inspect.signature(agentrl.train).parameters)[:2] == ["recipe", "overrides"]
    assert "base_url" in inspect.signature(agentrl.evaluate).parameters


def test_help_is_that_of_the_function() -> None:
    for package in (agentrl.train, agentrl.evaluate):
        text = pydoc.render_doc(package, renderer=pydoc.plaintext)
        assert "overrides: " in text and "Raises:" in text and "trainer" in text, "the package's own words stand below"
    assert inspect.getdoc(agentrl.train).startswith("train(recipe, overrides=None, *, ")  # type: ignore[union-attr]


def evaluated(url: str, folder: Path, **more: Any) -> agentrl.EvalResult:
    return agentrl.evaluate(Echo, model="m", base_url=url, output=folder / "out", console=Console(quiet=True), **more)


def check(found: agentrl.EvalResult, folder: Path) -> None:
    assert found.run_dir == folder / "out" and (found.run_dir / "result.json").is_file()
    assert (found.evaluation.n, found.evaluation.failed, len(found.episodes)) == (2, 1, 3)
    assert found.evaluation["reward"].mean == 0.5 and found.evaluation["reward"].low < 0.5
    assert found.evaluation.per_task["reward"] == {"test/0": 1.0, "test/1": 0.0}
    assert sum(found.failures.values()) == 1
    assert found.episodes[0].conversation()[-1]["content"] == "The answer is 42."


def test_a_class_is_evaluated_against_an_api_in_a_script(url: str, tmp_path: Path) -> None:
    check(evaluated(url, tmp_path), tmp_path)


async def test_the_same_beside_a_running_loop_and_in_a_thread(url: str, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    check(evaluated(url, tmp_path / "beside"), tmp_path / "beside")
    check(await asyncio.to_thread(evaluated, url, tmp_path), tmp_path)


def test_folders_of_our_own_do_not_collide(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api.time, "strftime", lambda *_: "now")
    found = [agentrl.evaluate(Echo, model="m", base_url=url, console=Console(quiet=True)) for _ in range(2)]
    assert [one.run_dir for one in found] == [Path("runs/eval-Echo-now"), Path("runs/eval-Echo-now-2")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: agentrl.train("arithmetic_gpro"), "did you mean 'arithmetic_grpo'"),
        (lambda: agentrl.train("arithmetic_grpo", {"trainer.lerning_rate": 1}), "did you mean 'trainer.learning_rate'"),
        (lambda: agentrl.train("arithmetic_grpo", trainer={"total_steps": 0}), "trainer.total_steps"),
        (lambda: agentrl.evaluate("arithmetik", model="m"), "did you mean 'arithmetic'"),
        (lambda: agentrl.evaluate("arithmetic", base_url="http://h/v1"), "needs --model"),
        (lambda: agentrl.evaluate("arithmetic", tasks=0), "eval.tasks"),
        (lambda: agentrl.evaluate(dict, model="m"), "no environment"),  # type: ignore[arg-type]
        (lambda: agentrl.evaluate(type("Inner", (Echo,), {"__qualname__": "f.Inner"}), model="m"), "module level"),
        (lambda: agentrl.evaluate("retryy", model="m"), "did you mean 'retry'"),
    ],
)
def test_what_is_wrong_is_a_users_error_before_anything_starts(
    call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agentrl.UserError, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


def test_train_refuses_a_recipe_that_only_evaluates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agentrl.UserError, match=r"trainer\.type=null.*agentrl\.evaluate"):
        agentrl.train("arithmetic_grpo", {"trainer.type": None})
    assert list(tmp_path.iterdir()) == []


def test_evaluate_refuses_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agentrl.UserError, match=r"trainer\.type=grpo.*agentrl\.train"):
        agentrl.evaluate("arithmetic", trainer={"type": "grpo"})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run is given; it goes no further."""
    found: dict[str, Any] = {}

    def stop(recipe: Any, **given: Any) -> Any:
        found.update(recipe=recipe, **given)
        raise agentrl.RunFailed("far enough", None)

    monkeypatch.setattr(api, "run_recipe", stop)
    return found


@pytest.mark.parametrize("what", ["retry", "Retry-v0", Echo])
@pytest.mark.parametrize(
    ("chosen", "model"),
    [
        ({}, ("HuggingFaceTB/SmolLM2-135M-Instruct", "chatml_tools")),
        ({"model": {"chat_template": "mine.jinja"}}, ("HuggingFaceTB/SmolLM2-135M-Instruct", "mine.jinja")),
        ({"model": "some"}, ("some", None)),
        ({"overrides": ["model.name=some"]}, ("some", None)),
        ({"overrides": {"model.name": "some"}}, ("some", None)),
        ({"model": {"name": "some"}}, ("some", None)),
    ],
)
def test_an_environment_without_a_recipe_has_the_default_model_unless_one_is_chosen(
    what: Any, chosen: dict[str, Any], model: tuple[str, str | None], seen: dict[str, Any]
) -> None:
    with pytest.raises(agentrl.RunFailed):
        agentrl.evaluate(what, **chosen)
    assert (seen["recipe"].model.name, seen["recipe"].model.chat_template) == model


def test_a_class_is_evaluated_as_it_is_trained(seen: dict[str, Any]) -> None:
    with pytest.raises(agentrl.RunFailed):
        agentrl.evaluate("arithmetic")
    named = seen["recipe"]
    with pytest.raises(agentrl.RunFailed):
        agentrl.evaluate(agentrl.envs.arithmetic.Arithmetic)
    assert seen["recipe"].model_copy(update={"name": named.name}) == named


def test_a_mapping_as_model_is_the_recipes_section(seen: dict[str, Any]) -> None:
    with pytest.raises(agentrl.RunFailed):
        agentrl.evaluate("arithmetic", model={"name": "some"}, inference={"urls": ["http://h:1"], "engine": "vllm"})
    assert (seen["recipe"].model.name, seen["recipe"].inference.engine, seen["numbered"]) == ("some", "vllm", True)


def test_a_notebook_is_quiet_unless_a_console_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not api.default_console().quiet
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert api.default_console().quiet


SCRIPT = """
import asyncio, sys
import agentrl

def work():
    server = {"engine": "openai", "urls": [sys.argv[1]], "request_timeout": 600}
    try:
        agentrl.evaluate("arithmetic", inference=server, model={"name": "m"}, tasks=2, output="out")
    finally:
        print("cleaned up", flush=True)

async def beside():
    work()

asyncio.run(beside()) if sys.argv[2] == "beside" else work()
print("went on")
"""


SILENT = """
import socket

server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(server.accept())
    print("asked", flush=True)
"""


@pytest.mark.parametrize("where", ["alone", "beside"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_script_as_it_ends_the_command(where: str, number: signal.Signals, tmp_path: Path) -> None:
    silent = subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True)
    assert silent.stdout is not None
    url = f"http://127.0.0.1:{silent.stdout.readline().strip()}/v1"
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, where],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert silent.stdout.readline() == "asked\n"  # a server that never answers has a request
        script.send_signal(number)
        out, _ = script.communicate(timeout=120)
    finally:
        script.kill()
        silent.kill()
        silent.communicate()
    assert script.returncode == 130, out
    assert "stopped" in out and "cleaned up" in out and "went on" not in out and "Traceback" not in out
    assert processes_of(tmp_path) == []


def test_a_stopped_run_may_be_caught_as_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise agentrl.RunStopped("stopped", None)


def records(folder: Path, *lines: str) -> Path:
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


FIRST = '{"step": 0, "time": 1.0, "eval/n": 2, "eval/invalid": 1, "eval/accuracy": 0.5, "eval/accuracy_low": 0.1, '
FIRST += '"eval/accuracy_high": 0.9, "eval/reward": 0.25}'


def test_a_result_says_what_the_files_say(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "eval-000000.json").write_text('{"per_task": {"accuracy": {"a": 0, "b": 1}}, "setup": {"tasks": 3}}')
    (tmp_path / "eval-000002.json").write_text('{"per_task": {"accuracy": {"a": 1, "b": 1}}}')
    second = '{"step": 2, "time": 3.0, "eval/n": 2, "eval/accuracy": 1.0}'
    found = read_training(records(tmp_path, FIRST, '{"step": 1, "time": 2.0, "x": 1}', second), ExitReason.TOTAL_STEPS)
    assert (found.steps, found.model, len(found.metrics)) == (2, tmp_path / "model", 3)
    assert found.before is not None and found.after is not None
    assert (found.before.n, found.before.failed, found.before["accuracy"].high) == (2, 1, 0.9)
    assert set(found.before.estimates) == {"accuracy", "reward"} and math.isnan(found.before["reward"].low)
    assert found.before.setup == {"tasks": 3} and found.changes["accuracy"].mean == 0.5


def test_without_a_second_evaluation_there_is_nothing_after(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = read_training(records(tmp_path, FIRST), ExitReason.FAILED, error="gone")
    assert found.before is not None and found.after is None and found.changes == {}
    assert (found.model, found.error) == (None, "gone"), "a model of an earlier run in that folder is not this one's"
    empty = read_training(tmp_path / "nothing", ExitReason.STOPPED)
    assert empty == TrainResult(tmp_path / "nothing", ExitReason.STOPPED, steps=0, seconds=0.0)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ('{"step": 9, "spent_budget": null}', ExitReason.TOTAL_STEPS),
        ('{"step": 5, "spent_budget": 60.0}', ExitReason.TIME_BUDGET),
        ('{"step": 5, "spent_budget": null}', ExitReason.EPOCHS),
        (None, ExitReason.FINISHED),
    ],
)
def test_the_reason_of_the_end_is_read_from_the_last_checkpoint(
    state: str | None, reason: ExitReason, tmp_path: Path
) -> None:
    from agentrl.config.recipe import TrainerConfig

    if state is not None:
        (tmp_path / "checkpoints" / "step-000005").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-000005" / "state.json").write_text(state)
    assert end_of(tmp_path, TrainerConfig(total_steps=9, epochs=2)) is reason


def test_an_evaluation_of_examples_has_no_episodes() -> None:
    found = Evaluation.of(3, {"eval/loss": 1.5, "eval/examples": 20}, {})
    assert (found.n, set(found.estimates)) == (0, {"loss"})
