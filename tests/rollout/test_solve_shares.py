"""The shares of groups that all of their episodes solved, and none."""

from agentrl.core.episode import EpisodeBase, StopReason
from agentrl.rollout.solve_shares import solve_shares


def group(*episodes: tuple[float | None, float | None]) -> list[EpisodeBase]:
    """Episodes of the given rewards and accuracies; a reward of ``None`` is a failure."""
    return [
        EpisodeBase(
            group_id="g", task_id="t", index=index, seed=index, reward=reward, stop_reason=StopReason.TERMINATED,
            metrics={} if accuracy is None else {"accuracy": accuracy},
        )
        for index, (reward, accuracy) in enumerate(episodes)
    ]  # fmt: skip


def test_groups_are_counted_by_accuracy_before_reward() -> None:
    all_right, mixed, none = group((0.1, 1.0), (1.3, 1.0)), group((1.0, 1.0), (0.0, 0.0)), group((1.0, 0.0), (1, 0.5))
    found = solve_shares([all_right, mixed, none, none])
    assert found == {"rollout/solve_all": 0.25, "rollout/solve_none": 0.5}


def test_rewards_tell_only_where_they_are_0_or_1() -> None:
    found = solve_shares([group((1.0, None), (1.0, None)), group((0.7, None), (0.2, None)), group((0.0, None))])
    assert found == {"rollout/solve_all": 0.5, "rollout/solve_none": 0.5}
    assert solve_shares([group((0.7, None))]) == {} and solve_shares([]) == {}


def test_failed_episodes_do_not_count() -> None:
    assert solve_shares([group((None, None), (1.0, None))]) == {"rollout/solve_all": 1.0, "rollout/solve_none": 0.0}
    assert solve_shares([group((None, 0.0))]) == {}
