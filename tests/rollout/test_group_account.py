"""What is counted of groups that were kept, filtered or failed, against counts by hand."""

import re

import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.rollout.group_account import UNIFORM, GroupAccount, Tally, failure_kind, judge, solved
from agentrl.rollout.stop_rules import MOST_REASONS, StopRules

CONFIG = RolloutConfig(group_size=4, skip_uniform_groups=True)


def episode(
    reward: float | None, stop: StopReason = StopReason.TERMINATED, error: str | None = None, **metrics: float
) -> Episode:
    node = Node(parent=None, message={}, token_ids=[5], loss_mask=[1], logprobs=[-1.0], versions=[0])
    return Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=reward, stop_reason=stop, error=error, metrics=metrics,
        trajectories={"assistant": Trajectory(nodes=[node])},
    )  # fmt: skip


def failed(stop: StopReason) -> Episode:
    return episode(None, stop, "why")


def test_every_group_and_episode_of_a_step_is_counted_by_kind() -> None:
    groups = [
        [
            episode(1.0, accuracy=1.0),
            episode(0.0, accuracy=0.0),
            episode(0.0, accuracy=0.0),
            failed(StopReason.TIMEOUT),
        ],
        [episode(1.0, accuracy=1.0)] * 4,  # all solved
        [episode(0.0, accuracy=0.0)] * 3 + [failed(StopReason.AGENT_ERROR)],  # none solved
        [failed(StopReason.TIMEOUT)] * 2 + [episode(None), episode(1.0, accuracy=1.0)],  # fails as a whole
    ]
    tallies = [judge(group, CONFIG, RewardConfig()) for group in groups]
    assert [tally.outcome for tally in tallies] == ["kept", "filtered", "filtered", "failed"]
    account = GroupAccount()
    for draw, tally in enumerate(tallies):
        if tally.outcome != "kept":
            account.leave_out(draw, tally)
    assert account.uncounted == [1, 2, 3]
    found = account.count(tallies[:1])
    assert found == {
        "rollout/groups_drawn": 4.0,
        "rollout/groups_kept": 1.0,
        "rollout/groups_filtered": 2.0,
        "rollout/groups_failed": 1.0,
        "rollout/groups_stale": 0.0,
        "rollout/filtered_all_solved": 1.0,
        "rollout/filtered_none_solved": 1.0,
        "rollout/episodes_drawn": 16.0,
        "rollout/failed": 5.0,
        "rollout/abandoned": 0.0,
        "rollout/retried": 0.0,
        "rollout/groups_short": 1.0,  # the first has three usable episodes of four
        "rollout/failed_timeout": 3.0,
        "rollout/failed_agent_error": 1.0,
        "rollout/failed_no_reward": 1.0,
        "rollout/all_solved": 0.5,  # the second and the fourth, whose one valid episode solved it
        "rollout/none_solved": 0.25,
        "reward/mean_drawn": pytest.approx(6 / 11),
        "reward/mean_kept": pytest.approx(1 / 3),
        "metrics/accuracy": pytest.approx(6 / 11),
        "metrics_kept/accuracy": pytest.approx(1 / 3),
    }
    assert account.count([])["rollout/groups_drawn"] == 0.0, "each group is counted once"


def test_a_mean_of_nothing_is_left_out() -> None:
    account = GroupAccount()
    account.leave_out(0, judge([failed(StopReason.TIMEOUT)] * 4, CONFIG, RewardConfig()))
    found = account.count([])
    assert found["rollout/failed"] == 4.0
    assert not [name for name in found if name.startswith(("reward/", "metrics"))]
    assert "rollout/all_solved" not in found


def test_solved_is_the_environments_accuracy_or_else_a_high_reward() -> None:
    assert solved(0.1, {"accuracy": 1.0}, 1.0)
    assert not solved(5.0, {"accuracy": 0.5}, 1.0)
    assert solved(1.0, {}, 1.0) and not solved(0.9, {}, 1.0) and solved(0.9, {}, 0.9)
    full = [episode(1.5, StopReason.CONTEXT_OVERFLOW)] * 4
    assert judge(full, CONFIG, RewardConfig()).solve_rate == 0.0, "the steps' rewards alone, and no accuracy"
    judged = [episode(1.5, StopReason.CONTEXT_OVERFLOW, accuracy=1.0)] * 4
    assert judge(judged, CONFIG, RewardConfig()).solve_rate == 1.0


@pytest.mark.parametrize(
    ("stop", "rate"),
    [
        (StopReason.TERMINATED, 1.0),
        (StopReason.LENGTH, 1.0),  # the environment ended it: it judged the cut answer
        (StopReason.TRUNCATED, 0.0),
        (StopReason.CONTEXT_OVERFLOW, 0.0),
    ],
)
def test_a_reward_says_solved_only_where_the_environment_ended_the_episode(stop: StopReason, rate: float) -> None:
    """``max_turns`` steps of reward 1 each are no solved task; an accuracy counts however the episode ended."""
    assert judge([episode(8.0, stop)] * 4, CONFIG, RewardConfig()).solve_rate == rate
    assert judge([episode(8.0, stop, accuracy=1.0)] * 4, CONFIG, RewardConfig()).solve_rate == 1.0
    assert judge([episode(8.0, stop, accuracy=0.0)] * 4, CONFIG, RewardConfig()).solve_rate == 0.0
    mixed = [episode(8.0, stop), episode(0.0, accuracy=1.0)]
    assert judge(mixed, CONFIG, RewardConfig()).solve_rate == (1.0 + rate) / 2


def test_a_failure_without_an_error_is_a_missing_reward() -> None:
    assert failure_kind(episode(None)) == "no_reward"
    assert failure_kind(episode(None, StopReason.TRUNCATED)) == "no_reward"
    assert failure_kind(failed(StopReason.CONTEXT_OVERFLOW)) == "context_overflow"


def uniform(rate: float, reward: float) -> Tally:
    return Tally("filtered", UNIFORM, episodes=2, rewards=(reward, reward), solve_rate=rate)


def test_reasons_that_all_differ_do_not_pile_up_and_the_most_frequent_is_said() -> None:
    rules = StopRules(RolloutConfig(group_size=1, batch_size=500, max_failure_rate=1))
    often = episode(None, StopReason.AGENT_ERROR, "often")
    found = None
    for number in range(500):
        differs = f"{chr(97 + number % 26) * (1 + number // 26)} " + "x" * 9999
        one = episode(None, StopReason.AGENT_ERROR, differs) if number % 2 else often
        found = rules.check([one], judge([one], CONFIG, RewardConfig()))
    assert len(rules._failures) <= MOST_REASONS
    assert found is not None and "250 times" in found and found.endswith("agent_error: often")


@pytest.mark.parametrize(
    ("tallies", "said"),
    [
        (
            [uniform(1.0, 2.0)] * 3,
            r"3 groups in a row had equal rewards .*: all solved\. .* 6 episodes of these 3 groups.* harder tasks",
        ),
        (
            [uniform(0.0, -0.5)] * 3,
            r"none solved, the rewards are around -0\.5\. None of the 6 episodes of these 3 groups .*too hard",
        ),
        (
            [uniform(1.0, 1.0), uniform(0.0, 0.0), uniform(0.5, 0.0)],
            r"1 groups all solved, 1 none solved, 1 solved in part",
        ),
    ],
)
def test_groups_without_signal_in_a_row_stop_the_run_with_a_diagnosis(tallies: list[Tally], said: str) -> None:
    rules = StopRules(RolloutConfig(group_size=2, skip_uniform_groups=True, max_uniform_groups=3))
    first, second, third = tallies
    assert rules.check([], first) is None and rules.check([], second) is None
    assert rules.check([], Tally("kept")) is None, "a group with signal starts the count anew"
    assert rules.check([], first) is None and rules.check([], second) is None
    assert rules.check([], Tally("failed")) is None, "a failed group says nothing of the rewards"
    assert rules.check([], Tally("filtered", "too old")) is None, "nor does one that was filtered for something else"
    reason = rules.check([], third)
    assert reason is not None
    assert re.search(said, reason), reason


def test_a_timeout_neither_counts_nor_ends_a_row_of_failures_of_the_infrastructure() -> None:
    rules = StopRules(RolloutConfig(group_size=2, max_failures_in_a_row=3))
    gone, late = failed(StopReason.INFERENCE_ERROR), failed(StopReason.TIMEOUT)
    cancelled, good = failed(StopReason.CANCELLED), episode(1.0)
    assert [rules.note(one) for one in (gone, late, cancelled, gone, good, gone, late, gone, late)] == [None] * 9
    found = rules.note(gone)
    assert found is not None and "failed 3 attempts in a row" in found and "inference_error" in found


def test_groups_that_fail_in_a_row_stop_the_run_though_few_episodes_do() -> None:
    """One failure in each group of eight is far below max_failure_rate, and yet no batch would ever be full."""
    config = RolloutConfig(group_size=8, on_failure="drop", max_failed_groups=3)
    rules = StopRules(config)
    group = [episode(None, StopReason.AGENT_ERROR, "the tool is gone"), *[episode(1.0)] * 7]
    failed = judge(group, config, RewardConfig())
    assert failed.outcome == "failed"
    assert rules.check(group, failed) is None and rules.check(group, failed) is None
    assert rules.check([], Tally("kept")) is None, "a group that is trained on starts the count anew"
    assert rules.check(group, failed) is None and rules.check([], uniform(1.0, 1.0)) is None
    assert rules.check(group, failed) is None
    found = rules.check(group, failed)
    assert found is not None and "3 groups in a row failed, each with fewer than 8 of 8 usable" in found
    assert "rollout.on_failure=drop" in found and "the tool is gone" in found
    assert rules.check(group, failed) is None, "said once"


def test_rewards_that_differ_by_the_rounding_of_a_sum_give_no_signal() -> None:
    same = [sum(steps) for steps in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.3, 0.1])]
    assert len(set(same)) == 2
    assert judge([episode(reward) for reward in same], CONFIG, RewardConfig()).outcome == "filtered"
    assert judge([episode(reward) for reward in (*same, 0.6 + 1e-9)], CONFIG, RewardConfig()).outcome == "kept"
