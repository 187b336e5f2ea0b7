"""Names and paths of environments, agents and workflows."""

from pathlib import Path

import pytest

import agentrl
from agentrl.core.registry import load, registered


def test_a_shipped_environment_is_found_by_its_id() -> None:
    assert load("env", "gsm8k").__name__ == "GSM8K"
    assert {"gsm8k", "arithmetic"} <= set(registered("env"))


def test_an_unknown_id_is_answered_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="'gsm8' is not registered, did you mean 'gsm8k'"):
        load("env", "gsm8")


def test_a_class_in_a_file_needs_no_registration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    mine = load("env", f"{tmp_path / 'mine.py'}:Mine")
    assert mine is load("env", f"{tmp_path / 'mine.py'}:Mine"), "loaded twice, it would be two classes"
    with pytest.raises(LookupError, match="did you mean 'Mine'"):
        load("env", f"{tmp_path / 'mine.py'}:Min")
    with pytest.raises(LookupError, match="no file"):
        load("env", f"{tmp_path / 'other.py'}:Mine")


def test_registering_imports_nothing_and_checks_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.registry._ENTRY_POINTS", {"env": {}, "agent": {}, "workflow": {}, "dataset": {}})
    agentrl.register("mine", "no_such_module:Mine")
    assert registered("env") == ["mine"]
    with pytest.raises(ModuleNotFoundError):
        load("env", "mine")
    with pytest.raises(ValueError, match="module:Class"):
        agentrl.register("bad", "no_colon")


def test_a_public_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert agentrl.Episode.__name__ == "Episode"
    with pytest.raises(AttributeError, match="Epsode"):
        _ = agentrl.Epsode
