"""``agentrl env``: a newcomer's way from nothing to an environment that trains."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import agentrl
from agentrl.cli.play import play_episode, read_action
from tests.end_to_end import environment, overrides, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("newcomer")
    result = run("env", "new", "my_shop", cwd=made)
    assert result.returncode == 0, result.stdout
    assert "agentrl env check my_shop" in result.stdout
    return made


def test_a_new_environment_is_short_found_by_name_and_passes_its_own_test(folder: Path) -> None:
    text = (folder / "envs" / "my_shop.py").read_text()
    assert len(text.splitlines()) <= 45
    listed = run("env", "list", cwd=folder).stdout
    assert "my_shop" in listed and "envs/my_shop.py:MyShop" in listed and "Look up prices" in listed
    own = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_my_shop.py"],
        cwd=folder, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert own.returncode == 0, own.stdout


def test_a_new_environment_passes_the_checker(folder: Path) -> None:
    result = run("env", "check", "my_shop", cwd=folder)
    assert result.returncode == 0, result.stdout


def test_a_new_recipe_trains_as_it_is(folder: Path, roomy_model: Path) -> None:
    own = [s for s in overrides(roomy_model, folder / "runs", "shop") if not s.startswith("env.id")]
    own += ["trainer.total_steps=1", "inference.context_length=2048", "trainer.tokens_per_microbatch=4096"]
    result = run("recipe", "run", "my_shop_grpo", *own, cwd=folder)
    assert result.returncode == 0, result.stdout
    assert "own list" in result.stdout
    record = json.loads((folder / "runs" / "shop" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"metrics/tool_calls", "metrics/accuracy", "eval/accuracy"} <= record.keys()
    template = (folder / "runs" / "shop" / "model" / "chat_template.jinja").read_text()
    assert "<tool_call>" in template, "the model is exported with the template it learned with"


@pytest.mark.parametrize(
    ("name", "message"), [("my_shop", "exists already"), ("My-Shop", "lower-case"), ("gsm8k", "registered")]
)
def test_nothing_is_overwritten_and_bad_names_are_answered(folder: Path, name: str, message: str) -> None:
    before = (folder / "envs" / "my_shop.py").read_text()
    result = run("env", "new", name, cwd=folder)
    assert result.returncode == 2 and message in result.stdout and "Traceback" not in result.stdout
    assert (folder / "envs" / "my_shop.py").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calculatr"], "did you mean 'calculator'"),
        (["calculator", "exampels=1"], "exampels"),
        (["calculator", "--task", "[1]"], "must be a JSON object"),
        (["calculator", "--task", "{"], "is not JSON"),
    ],
)
def test_play_answers_what_it_cannot_use(arguments: list[str], message: str) -> None:
    result = run("env", "play", *arguments)
    assert result.returncode == 2 and message in result.stdout and "Traceback" not in result.stdout


def test_a_person_plays_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(['/calculate {"expression": "6 * 7"}', "<<", "the answer", "is 42", "."])
    console = Console(width=200, record=True, force_terminal=False)
    monkeypatch.setattr(console, "input", lambda _: next(typed))
    env = agentrl.make("calculator")
    task = {"question": "What is 6 * 7?", "answer": "42"}
    total = asyncio.run(play_episode(env, seed=1, options=task, console=console))
    assert total == pytest.approx(1.2)
    text = console.export_text()
    assert "What is 6 * 7?" in text and '/calculate {"expression": "<string>"}' in text
    assert "tool: 42" in text and "terminated; reward of the episode: 1.2" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", {"role": "assistant", "content": "hello"}),
        ("/", {"role": "assistant", "content": "/"}),
        ("two\nlines", {"role": "assistant", "content": "two\nlines"}),
    ],
)
def test_what_is_typed_becomes_a_message(text: str, message: dict[str, Any]) -> None:
    assert read_action(text) == message
    call = read_action('so:\n/add {"a": 1}\n/stop', 3)
    assert call["content"] == "so:"
    assert [c["function"] for c in call["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1}'}, {"name": "stop", "arguments": "{}"},
    ]  # fmt: skip


def test_a_first_look_with_a_model_says_that_no_reward_differs(folder: Path, roomy_model: Path) -> None:
    small = [word for one in ("inference.context_length=2048", "sampling.max_new_tokens=4") for word in ("--set", one)]
    result = run("env", "check", "my_shop", "--model", str(roomy_model), *small, cwd=folder)
    assert result.returncode == 0, result.stdout
    told = " ".join(result.stdout.split())
    assert "32 episodes of 4 tasks: mean reward 0.000, 0% solved, 0 of 4 groups with different rewards" in told
    assert "no spread" in told and "agentrl.worked_call" in told and "no task was ever solved" in told
    assert not (folder / "runs" / "look").exists()
    assert "eval-episodes.jsonl" not in result.stdout, "a folder is named that is gone"
    strict = run("env", "check", "my_shop", "--set", "a.b=1", cwd=folder)
    assert strict.returncode == 2 and "give --model NAME too" in strict.stdout
