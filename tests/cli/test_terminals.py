"""What a person sees on terminals of several widths."""

import json
from pathlib import Path

import pytest

from agentrl.config.yaml12 import read_yaml
from tests.end_to_end import run
from tests.terminal import on_terminal

TASK = {
    "question": "What is 6 * 7? " + "Think of it as the sum of some sixes, one for each day of the week. " * 3,
    "answer": "42",
}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_play_breaks_lines_between_words(columns: int, tmp_path: Path) -> None:
    lines = on_terminal(
        ["env", "play", "calculator", "--task", json.dumps(TASK)], columns, tmp_path,
        typed=['/calculate {"expression": "6 * 7"}', "42"],
    )  # fmt: skip
    assert max(map(len, lines)) <= columns
    words = " ".join(" ".join(lines).split())
    for text in (TASK["question"], "or several lines ended by a line with a single dot after a first line of <<."):
        assert " ".join(text.split()) in words
    assert "tool: 42" in words and "terminated; reward of the episode: 1.2" in words


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_doctor_folds_its_findings(columns: int, tmp_path: Path) -> None:
    place = tmp_path / "runs" / "sick"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text(json.dumps({"rollout/episodes": 4.0, "rollout/failed": 3.0}) + "\n")
    whole = " ".join(run("doctor", "sick", cwd=tmp_path).stdout.split())
    lines = on_terminal(["doctor", "sick"], columns, tmp_path)
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == whole


def test_a_recipe_is_folded_between_words_and_can_still_be_read(tmp_path: Path) -> None:
    """Only what is no comment may be wider: keys with their values, and the formula."""
    whole = run("recipe", "show", "arithmetic_grpo", cwd=tmp_path).stdout
    lines = on_terminal(["recipe", "show", "arithmetic_grpo"], 80, tmp_path)
    wide = [line for line in lines if len(line) > 80]
    assert all(line.startswith(("description:", "#   ")) for line in wide), wide
    shown = read_yaml("\n".join(lines), "shown")
    assert shown == read_yaml(whole, "whole")
    words = " ".join(" ".join(line.partition("# ")[2] for line in lines if "# " in line).split())
    assert "Local folder, Hugging Face id, or a model that an installed package ships." in words
