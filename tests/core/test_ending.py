"""What counts as cut: per role, by the last answer, the limits of the run, and several answers to one prompt."""

import pytest

from agentrl.core.columns import Columns
from agentrl.core.ending import counted_metrics, cut_episodes, episode_cut, last_answers, stop_reason, trajectory_ends
from agentrl.core.episode import Episode, Node, StopReason, Trajectory

END = StopReason.TERMINATED


def trajectory(*nodes: tuple[int, str | None]) -> Trajectory:
    """Makes a trajectory of ``(parent, finish reason)``; -1 is no parent, no finish reason is a prompt."""
    return Trajectory(
        nodes=[
            Node(
                parent=None if parent < 0 else parent, message={"role": "x"}, token_ids=[1], logprobs=[0.0],
                loss_mask=[int(bool(finish))], versions=[0 if finish else -1], finish_reason=finish,
            )
            for parent, finish in nodes
        ]
    )  # fmt: skip


def episode(reason: StopReason = END, **roles: Trajectory) -> Episode:
    return Episode(group_id="g", task_id="t", index=0, seed=0, reward=0.0, stop_reason=reason, trajectories=roles)


SAID = trajectory((-1, None), (0, "stop"))
CUT = trajectory((-1, None), (0, "length"))
WENT_ON = trajectory((-1, None), (0, "length"), (1, None), (2, "stop"))
TWO_ANSWERS = trajectory((-1, None), (0, "length"), (0, "stop"))
TWO_CUT = trajectory((-1, None), (0, "length"), (0, "length"))
NEW_ROOT = trajectory((-1, None), (0, "length"), (-1, None), (2, "stop"))
NEW_ROOT_CUT = trajectory((-1, None), (0, "stop"), (-1, None), (2, "length"))
NO_ROOM = trajectory((-1, None), (0, "stop"), (1, None))

CASES = [
    (SAID, END, False, [1]),
    (CUT, END, True, [1]),
    (trajectory((-1, None), (0, "abort")), END, True, [1]),
    (WENT_ON, END, False, [3]),
    (TWO_ANSWERS, END, False, [1, 2]),
    (TWO_CUT, END, True, [1, 2]),
    (NEW_ROOT, END, False, [3]),
    (NEW_ROOT_CUT, END, True, [3]),
    (SAID, StopReason.TRUNCATED, True, [1]),
    (NO_ROOM, StopReason.CONTEXT_OVERFLOW, True, [1]),
    (CUT, StopReason.LENGTH, True, [1]),
    (SAID, StopReason.LENGTH, False, [1]),
    (SAID, StopReason.TIMEOUT, True, [1]),
    (trajectory((-1, None)), END, False, []),
]


@pytest.mark.parametrize(("given", "reason", "cut", "ends"), CASES)
def test_a_role_is_cut_where_its_last_answer_or_the_episode_was(
    given: Trajectory, reason: StopReason, cut: bool, ends: list[int]
) -> None:
    one = episode(reason, assistant=given)
    assert episode_cut(one) is cut
    columns = Columns.of([episode(assistant=SAID), one])
    assert trajectory_ends(columns) == ([False, cut], [[1], [2 + index for index in ends]])
    assert cut_episodes(columns) == [False, cut], "columns and episodes are asked the same"


def test_each_role_has_its_own_end_unless_a_limit_ended_all() -> None:
    game = {"white": CUT, "black": SAID}
    assert trajectory_ends(Columns.of([episode(**game)]))[0] == [True, False]
    assert trajectory_ends(Columns.of([episode(StopReason.LENGTH, **game)]))[0] == [True, False]
    assert trajectory_ends(Columns.of([episode(StopReason.TRUNCATED, **game)]))[0] == [True, True]
    assert episode_cut(episode(**game))


def test_the_recorded_reason_tells_that_the_last_answer_was_cut() -> None:
    assert stop_reason(END, {"assistant": CUT}) is StopReason.LENGTH
    assert stop_reason(END, {"white": SAID, "black": CUT}) is StopReason.LENGTH
    assert stop_reason(END, {"assistant": WENT_ON}) is END
    for reason in set(StopReason) - {END}:
        assert stop_reason(reason, {"assistant": CUT}) is reason, "what is known stays"


def test_an_answer_that_another_followed_is_no_end() -> None:
    # 1 and 3 answer the prompt 0; 1 was continued by 2 and 4 before 3 was sampled last
    assert last_answers([-1, 0, 1, 2, 0], [False, True, False, True, True]) == [4]


def test_an_episode_cut_before_it_was_judged_is_wrong_where_others_are_judged() -> None:
    judged = episode(assistant=SAID).model_copy(update={"metrics": {"accuracy": 1.0, "steps": 2.0}})
    cut = episode(StopReason.CONTEXT_OVERFLOW, assistant=NO_ROOM).model_copy(update={"metrics": {"steps": 9.0}})
    half = episode(StopReason.TRUNCATED, assistant=SAID).model_copy(update={"metrics": {"accuracy": 0.5}})
    plain = episode(assistant=SAID)
    assert counted_metrics([one.metrics for one in (judged, cut, half, plain)], [False, True, True, False]) == [
        {"accuracy": 1.0, "steps": 2.0}, {"accuracy": 0.0, "steps": 9.0}, {"accuracy": 0.5}, {},
    ]  # fmt: skip
    assert counted_metrics([cut.metrics], [True]) == [{"steps": 9.0}], "nothing reports accuracy here"
