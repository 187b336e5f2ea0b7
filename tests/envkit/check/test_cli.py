"""``agentrl env check``: what is printed, the settings, the exit code."""

import json

import pytest
import typer
from typer.testing import CliRunner

from agentrl.cli import env_check
from agentrl.config.errors import ConfigError
from agentrl.core.registry import load
from tests.envkit.check import faulty, leaky

app = typer.Typer()
app.command()(env_check.check)
FAULTY, LEAKY = faulty.__file__, leaky.__file__


def run(*argv: str):
    return CliRunner().invoke(app, [*argv, "--timeout", "5"])


def test_a_good_environment_gives_0_and_one_line_of_numbers() -> None:
    result = run("Arithmetic-v0", "digit_reward=0.5")
    assert result.exit_code == 0
    assert "0 errors, 0 warnings, 0 hints" in " ".join(result.stdout.split())
    assert "not checked: cancel-leak" in result.stdout


def test_an_error_gives_1_and_says_where_why_and_how_to_mend() -> None:
    result = run(f"{FAULTY}:LargeReward")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "ERROR reward-range" in said
    assert faulty.place_of("LargeReward") + "LargeReward.judge" in said
    assert "why: Metrics" in said and "mend: Clip" in said
    assert "1 error, 0 warnings" in said


def test_json_alone_is_on_standard_output() -> None:
    result = run(f"{LEAKY}:Talks", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"] and report["name"].endswith("Talks")
    assert "talking" in result.stderr


def test_strict_makes_a_warning_an_error() -> None:
    assert run(f"{LEAKY}:ChangesVariables").exit_code == 0
    assert run(f"{LEAKY}:ChangesVariables", "--strict").exit_code == 1


def test_a_task_may_be_given() -> None:
    assert run(f"{FAULTY}:NoTask").exit_code == 1
    assert run(f"{FAULTY}:NoTask", "--task", '{"question": "1?", "answer": "1"}').exit_code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("Arithmetik-v0",), "did you mean 'Arithmetic-v0'"),
        (("Arithmetic-v0", "digit_reward"), "looks like key=value"),
        (("Arithmetic-v0", "--task", "{"), "--task is not JSON"),
        (("Arithmetic-v0", "--task", "[1]"), "must be a JSON object"),
    ],
)
def test_a_users_error_says_what_to_do(argv: tuple[str, ...], words: str) -> None:
    result = run(*argv)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_an_argument_the_environment_does_not_take_is_a_finding() -> None:
    result = run("Arithmetic-v0", "digits=2")
    assert result.exit_code == 1
    assert "construct" in result.stdout and "digits" in result.stdout


def test_a_thread_that_would_hold_the_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(env_check, "leave_at_once", codes.append)
    try:
        assert run(f"{LEAKY}:KeepsProcess").exit_code == 1
    finally:
        load("env", f"{LEAKY}:KeepsProcess").stop.set()
    assert codes == [1]


def test_nested_settings_become_mappings() -> None:
    assert env_check.read_settings(["a=1", "b.c=[x]", "b.d=null"]) == {"a": 1, "b": {"c": ["x"], "d": None}}
