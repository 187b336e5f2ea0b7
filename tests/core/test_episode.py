"""Episodes as data."""

import pytest
from pydantic import ValidationError

from agentrl.core.episode import FAILURES, Episode, Node, StopReason, Trajectory
from tests.flat import flat_branches


def node(parent: int | None, ids: list[int], *, sampled: bool) -> Node:
    count = len(ids)
    return Node(
        parent=parent,
        message={"role": "assistant" if sampled else "user", "content": str(ids)},
        token_ids=ids,
        loss_mask=[int(sampled)] * count,
        logprobs=[-0.5 * sampled] * count,
        versions=[3 if sampled else -1] * count,
        finish_reason="stop" if sampled else None,
    )


def test_branches_share_history_and_train_each_sampled_token_once() -> None:
    """user - answer - two different follow-ups, each answered."""
    nodes = [
        node(None, [1, 2], sampled=False),
        node(0, [3], sampled=True),
        node(1, [4], sampled=False),
        node(2, [5, 6], sampled=True),
        node(1, [7], sampled=False),
        node(4, [8], sampled=True),
    ]
    first, second = flat_branches(Trajectory(nodes=nodes))
    assert (first.token_ids, first.loss_mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1])
    assert (second.token_ids, second.loss_mask) == ([1, 2, 3, 7, 8], [0, 0, 0, 0, 1])
    assert sum(first.loss_mask + second.loss_mask) == 4


def test_a_branch_that_samples_nothing_gives_no_sequence() -> None:
    assert flat_branches(Trajectory(nodes=[node(None, [1], sampled=False)])) == []


def test_an_episode_survives_json() -> None:
    trajectory = Trajectory(nodes=[node(None, [1], sampled=False), node(0, [2], sampled=True)])
    fields = {"group_id": "g", "task_id": "t", "index": 0, "seed": 1, "stop_reason": StopReason.TERMINATED}
    episode = Episode(**fields, trajectories={"assistant": trajectory}, reward=0.5)  # type: ignore[arg-type]
    assert Episode.model_validate_json(episode.model_dump_json()) == episode


@pytest.mark.parametrize("reason", sorted(FAILURES))
def test_failures_count_as_failed_whatever_reward_they_carry(reason: StopReason) -> None:
    assert Episode(group_id="g", task_id="t", index=0, seed=0, reward=1.0, stop_reason=reason).failed


def test_a_missing_reward_is_a_failure_and_zero_is_not() -> None:
    episode = Episode(group_id="g", task_id="t", index=0, seed=0, stop_reason=StopReason.TERMINATED)
    assert episode.failed
    assert not episode.model_copy(update={"reward": 0.0}).failed
    with pytest.raises(ValueError, match="group g has no reward: terminated"):
        episode.model_copy(update={"role_rewards": {"white": 1.0}}).reward_of("white")


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    base = {"group_id": "g", "task_id": "t", "index": 0, "seed": 0, "stop_reason": StopReason.TERMINATED}
    for given in ({"reward": reward}, {"reward": 0.0, "role_rewards": {"white": reward}}):
        with pytest.raises(ValidationError):
            Episode(**base, **given)  # type: ignore[arg-type]


def test_token_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValidationError, match="differ in length"):
        Node(parent=None, message={}, token_ids=[1, 2], loss_mask=[1], logprobs=[0.0], versions=[0])


def test_a_conversation_is_the_latest_branch_of_a_role() -> None:
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    nodes = [Node(parent=parent, message=message) for parent, message in zip((None, 0, 0), said, strict=True)]
    base = {"group_id": "g", "task_id": "t", "index": 0, "seed": 0, "stop_reason": StopReason.TERMINATED}
    spoken = Trajectory(nodes=nodes)
    for name, role in (("assistant", None), ("planner", None), ("planner", "planner")):
        episode = Episode(**base, trajectories={name: spoken})
        assert episode.conversation(role) == [said[0], said[2]]
    assert Episode(**base).conversation() == []
    with pytest.raises(KeyError, match="no role 'plan'; the episode's roles: planner"):
        episode.conversation("plan")
