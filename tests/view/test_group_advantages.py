"""Advantages of a group, against the formulas."""

import statistics

import pytest

from agentrl.view.group_advantages import advantages


def _row(member, reward, *, failed=False, retried=False, attempt=0):
    return {"member": member, "reward": reward, "failed": failed, "retried": retried, "attempt": attempt}


def _config(**trainer):
    return {"trainer": {"advantage": "group", "scale_rewards": "none", "whiten": "none", **trainer}, "reward": {}}


DEVIATION = statistics.stdev([1, 0, 0.5])
ROWS = [_row(0, 1.0), _row(1, 0.0), _row(2, None, failed=True), _row(3, 0.5)]


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [
        ({}, [0.5, -0.5, None, 0.0]),
        ({"advantage": "leave_one_out"}, [0.75, -0.75, None, 0.0]),
        ({"advantage": "reward"}, [1.0, 0.0, None, 0.5]),
        ({"scale_rewards": "group"}, [0.5 / DEVIATION, -0.5 / DEVIATION, None, 0.0]),
    ],
)  # fmt: skip
def test_they_follow_the_recipe(trainer, wanted):
    found, said = advantages(ROWS, _config(**trainer))
    assert [value is None for value in found] == [value is None for value in wanted]
    assert [v for v in found if v is not None] == pytest.approx([v for v in wanted if v is not None], abs=1e-5)
    assert "Computed from the recorded rewards" in said


def test_the_reward_is_the_one_that_the_trainer_sees():
    found, _ = advantages(ROWS, _config() | {"reward": {"scale": 2.0, "clip": [0.0, 1.0]}})
    assert found == pytest.approx([1 / 3, -2 / 3, None, 1 / 3])


def test_only_the_last_attempt_of_a_member_counts():
    rows = [_row(0, 0.0, retried=True), _row(0, 1.0, attempt=1), _row(1, 0.0)]
    assert advantages(rows, _config())[0] == pytest.approx([None, 0.5, -0.5])


@pytest.mark.parametrize(
    "trainer",
    [{"advantage": "gae"}, {"advantage": "turns"}, {"scale_rewards": "batch"}, {"whiten": "batch"}, {"baseline": "tag"},
     {"kl_in": "reward", "kl_coef": 0.1}, {"advantage": None}],
)  # fmt: skip
def test_where_rewards_are_not_enough_there_are_none_and_the_reason_is_said(trainer):
    found, said = advantages(ROWS, _config(**trainer))
    assert found == [None] * 4 and said


def test_an_attempt_whose_next_one_has_not_ended_counts_for_nothing():
    rows = [_row(0, 1.0, retried=True), _row(1, 0.5), _row(2, 0.0)]
    assert advantages(rows, _config())[0] == pytest.approx([None, 0.25, -0.25])
