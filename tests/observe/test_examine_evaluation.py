"""``agentrl doctor`` looks through an evaluation for what makes its number doubtful."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe, recipe_of_run
from agentrl.observe.examine_run import examine

FINE = {
    **{"eval/n": 200, "eval/invalid": 0, "eval/accuracy": 0.5, "eval/accuracy_low": 0.43, "eval/accuracy_high": 0.57},
    **{"answers": {"all": 200, "cut": 3, "empty": 0, "refused": 0, "filtered": 0}, "ended": "", "failures": {}},
}


def kinds(folder: Path, **found: Any) -> dict[str, str]:
    (folder / "result.json").write_text(json.dumps(FINE | found))
    return {one.kind: f"{one.symptom} {one.cause}" for one in examine(folder)[0]}


def test_what_makes_a_number_doubtful_is_told(tmp_path: Path) -> None:
    (tmp_path / "setup.json").write_text("{}")
    assert examine(tmp_path)[0] == [] and "the same command goes on" in examine(tmp_path)[1][0]
    assert kinds(tmp_path) == {}
    found = kinds(tmp_path, **{"eval/invalid": 8}, failures={"a: b": 1, "x\nagent_error: Boom": 7})
    assert found["invalid"].startswith("8 of 208 episodes") and "agent_error: Boom (7 times)" in found["invalid"]
    answers = {"all": 100, "cut": 30, "empty": 6, "refused": 5, "filtered": 4}
    assert set(kinds(tmp_path, answers=answers)) == {"cut", "empty", "refused"}
    found = kinds(tmp_path, **{"eval/accuracy_low": 0.2}, ended="eval.max_cost=1 is used up")
    assert set(found) == {"wide", "ended"} and "18 points" in found["wide"]
    (tmp_path / "result.json").write_text('{"eval/n": ')
    assert examine(tmp_path)[0] == [] and "is damaged" in examine(tmp_path)[1][0]


def test_a_folder_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    data = load_recipe("arithmetic_grpo").model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps({**data, "eval": {**data["eval"], "evry": 3}}))
    with pytest.raises(ConfigError, match=r"config.json is of another version, or damaged: .*eval\.evry"):
        recipe_of_run(tmp_path)
    (tmp_path / "config.json").write_text('{"model": ')
    with pytest.raises(ConfigError, match="or damaged"):
        recipe_of_run(tmp_path)
