"""A first look at a model: what its rewards could teach, from a few groups of them."""

import json
from pathlib import Path

import pytest

from agentrl.cli.first_look import read_look, recipe_for
from agentrl.envkit.check.first_look import FirstLook


def looked(*groups: list[float], right: float = 1.0) -> FirstLook:
    return FirstLook(groups, [[reward >= right for reward in group] for group in groups])


def problems(found: FirstLook) -> str:
    return "; ".join(f"{message} ({remedy})" for message, remedy in found.problems())


def test_rewards_that_differ_within_groups_are_no_problem() -> None:
    found = looked([0.0, 1.2], [0.2, 0.2])
    assert found.problems() == [] and found.with_spread == 1
    assert "2 tasks: mean reward 0.400, 25% solved, 1 of 2 groups with different rewards" in found.summary()


def test_equal_rewards_are_a_problem_though_they_differ_between_groups() -> None:
    found = looked([0.0, 0.0], [1.0, 1.0])
    assert "no spread" in problems(found) and "worked_call" in problems(found) and "never solved" not in problems(found)


def test_that_nothing_is_solved_is_said_also_where_the_form_can_be_learned() -> None:
    assert problems(looked([0.0, 0.2])).startswith("no task was ever solved: only the form can be learned")
    both = [message for message, _ in looked([0.0, 0.0]).problems()]
    assert len(both) == 2 and both[1] == "no task was ever solved"


@pytest.mark.parametrize(("groups", "told"), [([[1.0, 1.0]], "solved already"), ([], "no episode could be judged")])
def test_tasks_that_are_all_solved_and_episodes_that_all_fail_are_told(groups: list[list[float]], told: str) -> None:
    found = looked(*groups)
    (problem,) = found.problems()
    assert told in problem[0] and found.summary()


def test_failed_episodes_count_neither_as_wrong_nor_as_right(tmp_path: Path) -> None:
    episodes = [
        {"group_id": "a", "reward": 1.2, "metrics": {"accuracy": 1.0}, "stop_reason": "terminated"},
        {"group_id": "a", "reward": 0.2, "metrics": {"accuracy": 0.0}, "stop_reason": "length"},
        {"group_id": "b", "reward": 1.0, "metrics": {}, "stop_reason": "terminated"},
        {"group_id": "b", "reward": None, "metrics": {}, "stop_reason": "timeout"},
    ]
    file = tmp_path / "eval-episodes.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in episodes))
    found = read_look(file, solved_reward=1.0)
    assert (found.rewards, found.solved, found.failed) == ([[1.2, 0.2], [1.0]], [[True, False], [True]], 1)


def test_the_recipe_of_an_environment_is_found_by_its_class() -> None:
    assert recipe_for("calculator") == recipe_for("Calculator-v0") == "calculator_grpo"
    assert recipe_for("gsm8k") == "gsm8k_grpo" and recipe_for("retry") is None
