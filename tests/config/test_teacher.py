"""What is refused about a teacher, and what its servers are started with."""

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.teacher import as_teacher

PURE = "trainer.preset=distill"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([PURE], ["trainer.distill_coef=1", "teacher.model"]),
        (["trainer.distill_coef=0.3"], ["trainer.distill_coef=0.3", "teacher.model"]),
        (["teacher.model=big"], ["teacher.model=big", "trainer.distill_coef=0"]),
        ([PURE, "teacher.urls=[http://x]"], ["teacher.urls", "teacher.model"]),
        (
            [PURE, "teacher.model=big", "rollout.skip_uniform_groups=true"],
            ["rollout.skip_uniform_groups", "trainer.advantage=none"],
        ),
    ],
)
def test_a_teacher_that_cannot_act_is_refused(settings: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("arithmetic_grpo", settings)
    assert all(part in str(caught.value) for part in named), caught.value


def test_a_trainer_of_lines_has_no_teacher() -> None:
    with pytest.raises(ConfigError, match=r"teacher\.model does nothing with trainer\.type=sft"):
        load_recipe("gsm8k_sft", ["teacher.model=big"])


def test_an_evaluation_asks_no_teacher() -> None:
    load_recipe("arithmetic_grpo", [PURE, "trainer.type=null"])


def test_servers_of_the_teacher_are_its_own_with_room_for_the_longest_episode() -> None:
    settings = ["teacher.model=big", "teacher.engine=sglang", "teacher.args=[--tp,2]", "inference.context_length=100"]
    recipe = load_recipe("arithmetic_grpo", [PURE, *settings])
    served = as_teacher(recipe).inference
    assert (served.engine, served.args, served.context_length) == ("sglang", ("--tp", 2), 101)
    assert (recipe.inference.engine, recipe.inference.context_length) == ("embedded", 100)


def test_a_teacher_needs_no_group() -> None:
    load_recipe("arithmetic_grpo", [PURE, "teacher.model=big", "rollout.group_size=1"])
