"""Settings given in Python mean what they mean on the command line."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.settings import sets, settings_of


def loaded(overrides: Any = None, **sections: Any) -> Any:
    return load_recipe("arithmetic_grpo", settings_of(overrides, sections), device="cpu")


def test_a_dict_keyword_sections_and_texts_are_the_same_settings() -> None:
    by_text = loaded(["trainer.learning_rate=1e-3", "eval.tasks=null", "env.kwargs.digit_reward=0.5"])
    by_key = loaded({"trainer.learning_rate": 1e-3, "eval.tasks": None, "env.kwargs.digit_reward": 0.5})
    by_section = loaded(trainer={"learning_rate": 1e-3}, eval={"tasks": None}, env={"kwargs.digit_reward": 0.5})
    assert by_text == by_key == by_section != loaded()


def test_a_section_is_merged_key_by_key_and_keywords_win() -> None:
    plain, changed = loaded(), loaded({"trainer": {"total_steps": 7}, "seed": 1}, seed=2, trainer={"nproc": 1})
    assert (changed.trainer.total_steps, changed.seed) == (7, 2)
    assert changed.trainer.learning_rate == plain.trainer.learning_rate


def test_paths_and_tuples_are_taken(tmp_path: Path) -> None:
    recipe = loaded({"model.name": tmp_path}, inference={"urls": ("http://h:1",)})
    assert (recipe.model.name, recipe.inference.urls) == (str(tmp_path), ("http://h:1",))


def test_another_environment_drops_the_old_ones_arguments() -> None:
    assert loaded({"env.kwargs.digit_reward": 0.5, "env.id": "calculator", "env.kwargs": {}}).env.kwargs == {}


@pytest.mark.parametrize(
    ("given", "sections", "message"),
    [
        ({"trainer.lerning_rate": 1}, {}, "did you mean 'trainer.learning_rate'"),
        (None, {"trainer": {"lerning_rate": 1}}, "did you mean 'trainer.learning_rate'"),
        (None, {"learning_rate": 1}, "did you mean 'trainer.learning_rate'"),
        (None, {"trainr": {"learning_rate": 1}}, "did you mean 'trainer'"),
        ({"trainer.learning_rate": -1}, {}, "trainer.learning_rate"),
        ({"trainer.learning_rate": object()}, {}, "not plain data"),
        ({7: 1}, {}, "7 is no key"),
        ("trainer.learning_rate=1", {}, "want a dict, or a list"),
    ],
)
def test_what_is_wrong_is_said_as_on_the_command_line(given: Any, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(given, **sections)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded({"trainer.lerning_rate": 1, "seeed": 2})
    assert "trainer.learning_rate" in str(caught.value) and "'seed'" in str(caught.value)


def test_a_chosen_key_is_noticed_with_those_below_it() -> None:
    assert sets(["name=x"], "name") and sets([("name", "x")], "name")
    assert not sets(["model.name=x", ("env.id", "name")], "name")
    assert sets(["model.name=x"], "model") and not sets(["modell=x"], "model")
