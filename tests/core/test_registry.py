"""Names and paths of environments, agents and workflows."""

from pathlib import Path

import pytest

import agentrl
from agentrl.core.import_file import UserFileError
from agentrl.core.registry import load, registered, require, spec_of


def test_a_shipped_environment_is_found_by_its_id() -> None:
    assert load("env", "gsm8k").__name__ == "GSM8K"
    assert load("env", "GSM8K-v0") is load("env", "gsm8k")
    assert {"GSM8K-v0", "Arithmetic-v0"} <= set(registered("env"))


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
    monkeypatch.setattr("agentrl.core.registry._SPECS", {"env": {}})
    agentrl.register("mine", "no_such_module:Mine")
    assert registered("env") == ["mine"]
    with pytest.raises(ModuleNotFoundError):
        load("env", "mine")
    with pytest.raises(ValueError, match="module:Class"):
        agentrl.register("bad", "no_colon")
    with pytest.raises(ValueError, match="did you mean 'env'"):
        agentrl.register("bad", "a:b", kind="envs")  # type: ignore[arg-type]


def test_a_name_without_a_version_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.registry._SPECS", {"env": {}})
    for version in (9, 10, 2):
        agentrl.register(f"Shop-v{version}", f"shop{version}:Shop", kwargs={"size": version})
    assert spec_of("env", "shop").kwargs == {"size": 10}
    assert spec_of("env", "Shop-v2").entry_point == "shop2:Shop"
    with pytest.raises(LookupError, match="did you mean 'Shop-v9'"):
        spec_of("env", "Shop-v3")


LOCAL = "from agentrl import ToolEnvironment\n\nclass {name}(ToolEnvironment):\n    size = 1\n"


def test_environments_in_the_working_folder_are_found_without_running_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "my_shop.py").write_text(LOCAL.format(name="MyShop") + "\nclass Helper: ...\n")
    (tmp_path / "envs" / "two.py").write_text(LOCAL.format(name="One") + LOCAL.format(name="Other"))
    (tmp_path / "envs" / "broken.py").write_text("raise SystemExit('ran')\nclass Broken(Environment): ...\n")
    (tmp_path / "envs" / "no.py").write_text("def (")
    assert spec_of("env", "my_shop").entry_point == "envs/my_shop.py:MyShop"
    assert spec_of("env", "MyShop").entry_point == "envs/my_shop.py:MyShop"
    assert spec_of("env", "other").entry_point == "envs/two.py:Other"
    assert spec_of("env", "broken").entry_point == "envs/broken.py:Broken"
    with pytest.raises(LookupError, match=r"envs/two\.py has 2 environments \(One, Other\); say which"):
        spec_of("env", "two")
    with pytest.raises(LookupError, match="not registered"):
        spec_of("env", "no_such")
    assert load("env", "my_shop").__name__ == load("env", "envs/my_shop.py").__name__ == "MyShop"
    (tmp_path / "envs" / "lake.py").write_text(LOCAL.format(name="Lake") + "\ndef make_env(): return Lake()\n")
    assert spec_of("env", "lake").entry_point == "envs/lake.py:make_env"
    with pytest.raises(LookupError, match=r"envs/no\.py:1 cannot be parsed"):
        spec_of("env", "no")
    with pytest.raises(ImportError, match=r"broken\.py:1 ended the program while .*broken\.py was imported"):
        load("env", "broken")
    with pytest.raises(LookupError, match=r"did you mean 'my_shop'\? Known: .*my_shop"):
        spec_of("env", "my_shap")


def test_a_file_that_fails_to_import_fails_again(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("class Bad: ...\nraise ValueError('half')\n")
    for _ in range(2):
        with pytest.raises(UserFileError, match=r"bad\.py:2: ValueError: half"):
            load("env", f"{tmp_path / 'bad.py'}:Bad")


def test_what_is_needed_later_is_looked_for_without_an_import(tmp_path: Path) -> None:
    require("objective", "clip")
    (tmp_path / "mine.py").write_text("import torch_that_is_not_there\ndef loss(): ...\n")
    require("objective", f"{tmp_path / 'mine.py'}:loss")
    with pytest.raises(LookupError, match="has no 'los', did you mean 'loss'"):
        require("objective", f"{tmp_path / 'mine.py'}:los")
    with pytest.raises(LookupError, match="did you mean 'clip'"):
        require("objective", "clipp")


def test_make_says_what_does_not_fit() -> None:
    env = agentrl.make("arithmetic", digit_reward=0.5)
    assert env.spec is not None and (env.spec.id, env.spec.kwargs) == ("Arithmetic-v0", {"digit_reward": 0.5})
    with pytest.raises(TypeError, match=r"Arithmetic-v0 with arguments \{'digits': 1\}.*digits"):
        agentrl.make("arithmetic", digits=1)
    with pytest.raises(TypeError, match=r"made a dict, which is no agentrl\.Environment"):
        agentrl.make("builtins:dict")


def test_a_public_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert agentrl.Episode.__name__ == "Episode"
    with pytest.raises(AttributeError, match="Epsode"):
        _ = agentrl.Epsode
