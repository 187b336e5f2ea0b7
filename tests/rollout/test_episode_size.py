"""Sizes and versions of episodes in columns, compared with those of their messages."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.rollout.episode_size import newest_versions, oldest_versions, sizes_of

VERSIONS = st.lists(st.integers(-1, 4), max_size=3)  # of a message's tokens; -1: not sampled
EPISODES = st.lists(st.dictionaries(st.sampled_from("ab"), st.lists(VERSIONS, min_size=1, max_size=3)), max_size=5)


def episode(index: int, roles: dict[str, list[list[int]]]) -> Episode:
    """An episode with a chain of messages for each role."""
    trajectories = {
        role: Trajectory(
            nodes=[
                Node(
                    parent=at - 1 if at else None, message={}, token_ids=[7] * len(versions),
                    loss_mask=[int(one >= 0) for one in versions], logprobs=[0.0] * len(versions), versions=versions,
                )
                for at, versions in enumerate(messages)
            ]
        )
        for role, messages in roles.items()
    }  # fmt: skip
    return Episode(
        group_id="g", task_id="t", index=index, seed=0, reward=1.0, stop_reason=StopReason.TERMINATED,
        trajectories=trajectories,
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(EPISODES)
def test_sizes_and_versions_are_those_of_the_sampled_tokens(given_roles: list[dict[str, list[list[int]]]]) -> None:
    columns = Columns.of([episode(index, roles) for index, roles in enumerate(given_roles)])
    messages = [[one for role in roles.values() for one in role] for roles in given_roles]
    sampled = [[version for one in of_episode for version in one if version >= 0] for of_episode in messages]
    assert oldest_versions(columns) == [min(one, default=None) for one in sampled]
    assert newest_versions(columns) == [max(one, default=None) for one in sampled]
    turns = [sum(any(version >= 0 for version in one) for one in of_episode) for of_episode in messages]
    assert [(one.tokens, one.turns) for one in sizes_of(columns)] == list(zip(map(len, sampled), turns, strict=True))
