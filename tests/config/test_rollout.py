"""Filters and curricula that cannot work beside another setting are refused with both keys."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe

SKIP = {"rollout": {"skip_uniform_groups": True}}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"model": {"name": "x"}, "env": {"id": "arithmetic"}, **sections})


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ({"advantage": "gae", "scale_rewards": "none"}, "trainer.advantage=gae"),
        ({"advantage": "turns"}, "trainer.advantage=turns"),
        ({"advantage": "reward", "scale_rewards": "none"}, "trainer.advantage=reward"),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "trainer.kl_in=reward"),
    ],
)
def test_skipped_uniform_groups_are_refused_where_they_teach(trainer: dict[str, Any], keys: str) -> None:
    with pytest.raises(ValidationError, match=rf"rollout\.skip_uniform_groups=true .*{re.escape(keys)}"):
        recipe(**SKIP, trainer=trainer)
    recipe(trainer=trainer)


def test_skipped_uniform_groups_are_refused_without_rewards_and_in_groups_of_one() -> None:
    distill = {"teacher": {"model": "y"}, "trainer": {"preset": "distill"}}
    recipe(**distill)
    with pytest.raises(ValidationError, match=r"rollout\.skip_uniform_groups .*trainer\.advantage=none"):
        recipe(**SKIP, **distill)
    beside = {"teacher": {"model": "y"}, "trainer": {"distill_coef": 0.1}}
    recipe(**beside)
    with pytest.raises(ValidationError, match=r"rollout\.skip_uniform_groups=true .*trainer\.distill_coef=0\.1"):
        recipe(**SKIP, **beside)
    one = {"skip_uniform_groups": True, "group_size": 1}
    with pytest.raises(ValidationError, match=r"drops every group of rollout\.group_size=1"):
        recipe(rollout=one, trainer={"advantage": "own.py:f", "scale_rewards": "none"})
    recipe(**SKIP)
    recipe(**SKIP, trainer={"preset": "dapo"})


@pytest.mark.parametrize(
    ("rollout", "trainer", "message"),
    [
        ({"max_uniform_groups": 9}, {}, r"max_uniform_groups=9 does nothing with rollout\.skip_uniform_groups=false"),
        ({"stale": "keep", "max_stale_groups": 9}, {}, r"max_stale_groups=9 does nothing with rollout\.stale=keep"),
        ({"curriculum": {"retire_after": 3}}, {}, r"curriculum\.retire_after does .* rollout\.curriculum\.retire_at="),
        ({"on_failure": "keep", "retries": 3}, {}, r"retries=3 does nothing with rollout\.on_failure=keep"),
        ({"on_failure": "drop", "min_group": 3}, {}, r"min_group=3 does nothing with rollout\.on_failure=drop"),
        ({"min_group": 9}, {}, r"rollout\.min_group=9 is more than rollout\.group_size=8"),
        (
            {"curriculum": {"retire_at": 0.9, "window": 3}},
            {},
            r"curriculum\.window .* rollout\.curriculum\.hard_at=null",
        ),
        ({"curriculum": {"retire_at": 0.9, "pools": ["a"]}}, {}, r"curriculum\.pools .*curriculum\.column=null"),
        ({"curriculum": {"retire_at": 0.2, "hard_at": 0.2}}, {}, r"hard_at=0\.2 is not below .*retire_at=0\.2"),
        ({"curriculum": {"column": "n", "pools": ["a", "a"]}}, {}, r"names a pool twice"),
        ({"curriculum": {"retire_at": 0.9}}, {"epochs": 2}, r"trainer\.epochs=2 .*rollout\.curriculum"),
        ({"curriculum": {"column": "n"}}, {"save_epochs": 1}, r"trainer\.save_epochs=1 .*rollout\.curriculum"),
    ],
)
def test_keys_that_cannot_act_are_refused(rollout: dict[str, Any], trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(rollout=rollout, trainer=trainer)


def test_a_run_reads_its_own_configuration_again() -> None:
    """There every key is set, also those that could not act if a user had set them."""
    for one in (recipe(), recipe(rollout={"curriculum": {"column": "n", "pools": ["a", 1, 0.5]}})):
        assert Recipe.model_validate(one.model_dump(mode="json")) == one


@pytest.mark.parametrize("value", ["-1", "some", "1.5"])
def test_a_staleness_bound_is_a_number_or_auto_and_a_wrong_one_is_one_problem(value: str) -> None:
    found = [load_recipe("arithmetic_grpo", [f"rollout.max_staleness={one}"], device="cpu") for one in ("0", "auto")]
    assert [one.rollout.max_staleness for one in found] == [0, "auto"]
    with pytest.raises(ConfigError) as caught:
        load_recipe("arithmetic_grpo", [f"rollout.max_staleness={value}"], device="cpu")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("rollout.max_staleness was ")
    assert "but must be a whole number or auto, at least 0" in line


def test_a_curriculum_is_set_on_the_command_line() -> None:
    settings = ["rollout.curriculum.column=level", "rollout.curriculum.pools=[easy, hard]"]
    own = load_recipe("arithmetic_grpo", settings, device="cpu").rollout.curriculum
    assert own.active and own.pools == ("easy", "hard")
