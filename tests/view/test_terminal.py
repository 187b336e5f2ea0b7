"""Episodes in a terminal: what keys do, and that every line fits."""

import pytest
from rich.console import Console

from agentrl.view.terminal import Screen


@pytest.fixture
def screen(runs):
    return Screen(runs)


def shown(screen, columns=80, rows=24):
    lines = screen.lines(Console(width=columns, height=rows), rows)
    assert len(lines) <= rows
    assert all(line.cell_len <= columns for line in lines)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("rows", [6, 24, 60])
@pytest.mark.parametrize("keys", [[], ["enter"], ["enter", "t"], ["e"], ["/", "x"]])
def test_every_screen_fits(screen, columns, rows, keys):
    shown(screen, columns, rows)
    for key in keys:
        screen.press(key)
        shown(screen, columns, rows)


def test_the_list_is_walked_and_an_episode_opened(screen):
    assert "1 of 65" in shown(screen)
    screen.press("j")
    assert "2 of 65" in shown(screen)
    screen.press("enter")
    text = shown(screen)
    assert "What is" in text and "calculate(" in text
    screen.press("q")
    assert "2 of 65" in shown(screen)
    screen.press("q")
    assert screen.done


def test_what_a_model_said_is_not_obeyed(screen):
    from tests.view.conftest import append, hostile_episode

    record = hostile_episode()
    record["trajectories"]["assistant"]["nodes"][-1]["message"]["content"] = "\x1b[2J\x07[bold]gone"
    append(screen.runs[0].folder / "episodes.jsonl", record)
    screen.runs[0].index.update()
    assert "\x1b" not in shown(screen) + shown(screen)
    screen.press("enter")
    assert "\x1b" not in shown(screen, rows=60) and "[bold]gone" in shown(screen, rows=60)


def test_a_filter_is_typed_and_a_wrong_one_is_said(screen):
    shown(screen)
    screen.press("/")
    for key in "tag:hard":
        screen.press(key)
    assert "filter: tag:hard" in shown(screen)
    screen.press("enter")
    assert "tag:hard" in shown(screen) and "of 32" in shown(screen)
    screen.press("/")
    for key in ["backspace"] * 8 + list("rewad<1") + ["enter"]:
        screen.press(key)
    assert "did you mean 'reward'" in shown(screen, columns=200)


def test_the_tokens_have_their_ids_and_logprobs(screen):
    shown(screen)
    screen.press("j")
    screen.press("enter")
    screen.press("t")
    text = shown(screen, columns=120, rows=60)
    assert "logprob" in text and "sampled v" in text


def test_outside_a_terminal_the_list_is_lines(runs_folder, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from agentrl.cli.main import app

    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    command = ["view", "first", "--run-dir", str(runs_folder), "--tui", "--filter", "tag:hard"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and len(result.output.splitlines()) == 33
    assert "tokens" in result.output.splitlines()[0] and "#### " in result.output
    wrong = CliRunner().invoke(app, [*command[:-1], "rewad<1"])
    assert "did you mean 'reward'" in str(wrong.exception)
