"""Columns of episodes: nothing is lost, and bytes give the same columns."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.columns import COLUMNS, Columns, concatenate, split
from agentrl.core.episode import NOT_SAMPLED, Episode, Node, StopReason, Trajectory
from agentrl.core.experts import ExpertRows

floats = st.floats(-20, 0, width=32)
rewards = st.none() | st.floats(-5, 5)


@st.composite
def nodes(draw: st.DrawFn, index: int) -> Node:
    mask = draw(st.lists(st.integers(0, 1), max_size=5))
    taught = draw(st.booleans())
    return Node(
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        message={},
        token_ids=[draw(st.integers(0, 200_000)) for _ in mask],
        loss_mask=mask,
        logprobs=[draw(floats) if m else 0.0 for m in mask],
        versions=[draw(st.integers(0, 9)) if m else NOT_SAMPLED for m in mask],
        finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
        reward=draw(rewards),
        teacher_logprobs=[draw(floats) if m else 0.0 for m in mask] if taught else [],
        experts=draw(experts(len(mask))),
    )


@st.composite
def experts(draw: st.DrawFn, tokens: int) -> ExpertRows | None:
    """Rows of two numbers, some not known; of a layer with few experts, or of one with many."""
    most = draw(st.sampled_from([3, 254, 255, 600]))
    row = st.just([-1, -1]) | st.lists(st.integers(0, most), min_size=2, max_size=2)
    rows = np.array(draw(st.lists(row, min_size=tokens, max_size=tokens))).reshape(tokens, 2)
    return ExpertRows.of(rows) if (rows >= 0).any() and draw(st.booleans()) else None


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    roles = draw(st.lists(st.sampled_from(["solver", "judge", "Ünïcode"]), unique=True, max_size=3))
    return Episode(
        group_id=draw(st.sampled_from(["a", "b"])), task_id=draw(st.text(max_size=4)), index=0, seed=1,
        trajectories={
            role: Trajectory(nodes=[draw(nodes(index)) for index in range(draw(st.integers(0, 4)))]) for role in roles
        },
        reward=draw(rewards), role_rewards={role: draw(st.floats(-5, 5)) for role in roles[:2]},
        tag=draw(st.none() | st.text(max_size=4)), metrics={"accuracy": 1.0}, drift={"text": 0.5},
        stop_reason=draw(st.sampled_from(StopReason)),
        error=draw(st.none() | st.text(max_size=9)), seconds=1.5,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(episodes(), max_size=4))
def test_columns_and_back_give_the_same_episodes(made: list[Episode]) -> None:
    assert Columns.of(made).to_episodes() == made
    again, more = Columns.from_bytes(Columns.of(made).to_bytes(step=3))
    assert again.to_episodes() == made and more == {"step": 3}


@settings(max_examples=60, deadline=None)
@given(st.lists(episodes(), max_size=3), st.lists(episodes(), max_size=3))
def test_columns_of_parts_are_those_of_the_whole(first: list[Episode], second: list[Episode]) -> None:
    """Also where a teacher scored one part alone."""
    joined, whole = concatenate([Columns.of(first), Columns.of(second)]), Columns.of([*first, *second])
    assert joined.episodes == whole.episodes
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), name)


def test_a_sampled_token_takes_thirteen_bytes_and_another_one_five() -> None:
    def one(sampled: bool) -> Columns:
        count = 1000
        values = {"logprobs": [-1.0 * sampled] * count, "versions": [0 if sampled else NOT_SAMPLED] * count}
        node = Node(
            parent=None, message={"content": "x" * 999}, token_ids=[7] * count, loss_mask=[sampled] * count, **values
        )
        episode = Episode(
            group_id="g", task_id="t", index=0, seed=0, stop_reason=StopReason.TERMINATED,
            trajectories={"a": Trajectory(nodes=[node])},
        )  # fmt: skip
        return Columns.of([episode])

    small = Columns.of([]).nbytes
    assert one(True).nbytes - one(False).nbytes == 8 * 1000
    assert one(False).nbytes - small == 5 * 1000 + 22, "a message adds 22 bytes, whatever it says"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reward_that_is_no_number_is_refused_before(value: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        Episode(group_id="g", task_id="t", index=0, seed=0, stop_reason=StopReason.TERMINATED, reward=value)


@settings(max_examples=60, deadline=None)
@given(st.lists(episodes(), min_size=1, max_size=4), st.data())
def test_experts_go_with_their_tokens_when_episodes_are_chosen_or_split(
    made: list[Episode], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=len(made), max_size=len(made)))
    kept = [one for one, own in zip(made, chosen, strict=True) if own]
    assert Columns.of(made).select(chosen).to_episodes() == kept
    assert [part.to_episodes()[0] for part in split(Columns.of(made))] == made


def test_rows_of_two_models_are_refused() -> None:
    made = [
        Node(
            parent=None, message={}, token_ids=[1], loss_mask=[0], logprobs=[0.0], versions=[NOT_SAMPLED], experts=rows
        )
        for rows in (ExpertRows.of(np.zeros((1, 2), int)), ExpertRows.of(np.zeros((1, 3), int)))
    ]
    episode = Episode(
        group_id="a",
        task_id="t",
        index=0,
        seed=0,
        trajectories={"r": Trajectory(nodes=made)},
        reward=0.0,
        stop_reason=StopReason.TERMINATED,
    )
    with pytest.raises(ValueError, match="2 and 3 experts"):
        Columns.of([episode])


def test_experts_of_more_or_fewer_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="experts of 2 tokens for 1"):
        Node(
            parent=None, message={}, token_ids=[1], loss_mask=[0], logprobs=[0.0], versions=[NOT_SAMPLED],
            experts=ExpertRows.of(np.zeros((2, 2), int)),
        )  # fmt: skip
