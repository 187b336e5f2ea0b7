"""Episodes from another process: the same values, read only when they are asked for."""

import json

import numpy as np
import pytest

from agentrl.core.columns import COLUMNS, Columns, concatenate, split
from agentrl.core.ending import episode_cut
from agentrl.core.episode import Episode, Node, StopReason, Task, Trajectory
from agentrl.core.experts import ExpertRows
from agentrl.core.sent_episode import SentEpisode, columns_of
from agentrl.rollout.episode_runs import EpisodeOrder
from agentrl.rollout.journal import Journal, read_episodes
from agentrl.rollout.worker_wire import Ended, ended_from_bytes, ended_to_bytes, packed

ORDER = EpisodeOrder(Task(id="train/1", data={"question": "1+1"}), "g7", 0, 11, version=3)


def made(index: int = 0, *, teacher: bool = False, **more: object) -> Episode:
    """An episode of two turns, one of them a branch, with odd text and logprobs that float32 cannot hold."""
    asked = {"role": "user", "content": "1+1\u2028é"}
    nodes = [
        Node(parent=None, message=asked, token_ids=[1, 2], loss_mask=[0, 0], logprobs=[0.0] * 2, versions=[-1] * 2),
        Node(
            parent=0, message={"role": "assistant", "content": "2"}, token_ids=[3, 4, 5], loss_mask=[1, 1, 1],
            logprobs=[-0.1, -1 / 3, -2e-9], versions=[2, 2, 3], finish_reason="length", reward=0.1 + index,
            teacher_logprobs=[-0.5, -0.25, -0.125] if teacher else [],
        ),
        Node(parent=None, message=asked, token_ids=[1], loss_mask=[0], logprobs=[0.0], versions=[-1], follows=1),
    ]  # fmt: skip
    values = {"reward": 0.1 + 0.2, "metrics": {"accuracy": 1.0}, "stop_reason": StopReason.LENGTH} | more
    return Episode(
        group_id="g7", task_id="train/1", index=index, seed=11, task=ORDER.task.data, version=3, seconds=1.5,
        started="2026-01-01T00:00:00.000", sampling={"temperature": 1.0, "stop": ["x"]},
        trajectories={"assistant": Trajectory(nodes=nodes), "judge": Trajectory(nodes=nodes[:1])}, **values,
    )  # fmt: skip


def sent(*episodes: Episode) -> list[Episode]:
    """The episodes as the controller reads them."""
    data = ended_to_bytes([Ended(number, packed(one)) for number, one in enumerate(episodes)], worker=1)
    delivered, more = ended_from_bytes(data)
    assert more == {"worker": 1}
    return [one.episode(ORDER) for one in delivered]


def test_a_sent_episode_has_the_values_of_the_one_that_ran() -> None:
    episodes = [made(0), made(1, reward=None, stop_reason=StopReason.TIMEOUT, error="x\ny", abandoned=True)]
    for episode, came in zip(episodes, sent(*episodes), strict=True):
        assert isinstance(came, SentEpisode)
        for name in Episode.model_fields:
            if name != "trajectories":
                assert getattr(came, name) == getattr(episode, name), name
        assert (came.failed, came.roles, episode_cut(came)) == (episode.failed, episode.roles, episode_cut(episode))
        assert "trajectories" not in vars(came), "nothing so far needs a message"
        assert came.trajectories == episode.trajectories  # to the last bit of a logprob
        assert came.whole() == episode


def test_its_columns_are_those_of_the_episode() -> None:
    episodes = [made(0), made(1, reward=None, stop_reason=StopReason.AGENT_ERROR), made(2)]
    for together in (episodes, episodes[:1]):
        here, there = Columns.of(together), columns_of(sent(*together))
        assert here.episodes == there.episodes
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
            assert getattr(here, name).dtype == getattr(there, name).dtype


@pytest.mark.parametrize("teacher", [False, True])
def test_split_is_the_inverse_of_concatenate(teacher: bool) -> None:
    whole = Columns.of([made(0, teacher=teacher), made(1), made(2, teacher=teacher)])
    again = concatenate(split(whole))
    assert again.episodes == whole.episodes
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))
    assert split(Columns.of([])) == []


def test_a_changed_copy_is_an_ordinary_episode() -> None:
    """A teacher's logprobs, say: the columns and the line of the unchanged one must not stay with it."""
    (came,) = sent(made())
    taught = came.model_copy(update={"trajectories": made(teacher=True).trajectories})
    assert type(taught) is Episode
    assert len(columns_of([taught]).teacher_logprobs) == 3


def test_a_copy_keeps_the_experts_that_the_line_lacks() -> None:
    """A teacher scores a copy, and the update replays the experts of the policy's server."""
    episode = made()
    first, answer = episode.trajectories["assistant"].nodes[:2]
    rows = ExpertRows.of(np.arange(12).reshape(3, 4))
    answer.experts = rows
    (came,) = sent(episode)
    nodes = came.model_copy(update={"reward": 2.0}).trajectories["assistant"].nodes
    assert [node.experts for node in nodes] == [None, rows, None]
    changed = came.model_copy(update={"reward": 2.0})
    np.testing.assert_array_equal(columns_of([changed]).experts, Columns.of([episode]).experts)
    assert first.experts is None


def test_writing_it_never_leaves_out_its_conversations() -> None:
    assert sent(made())[0].model_dump() == made().model_dump()
    assert json.loads(sent(made())[0].model_dump_json()) == json.loads(made().model_dump_json())


def test_the_journal_writes_the_line_of_the_worker(tmp_path) -> None:
    journal = Journal(tmp_path, episodes=True)
    (came,) = sent(made())
    assert journal.episode(came) is came
    journal.episode(sent(made())[0], evaluation_step=4)
    journal.close()
    assert list(read_episodes(tmp_path / "episodes.jsonl")) == [made()]
    assert list(read_episodes(tmp_path / "eval-episodes.jsonl")) == [made()]
    assert "trajectories" not in vars(came)


def test_an_episode_that_is_no_json_comes_as_a_failed_one() -> None:
    broken = made()
    broken.trajectories["assistant"].nodes[0].message["content"] = object()
    (came,) = sent(broken)
    assert came.failed and came.stop_reason == StopReason.ENVIRONMENT_ERROR
    assert "cannot be written as JSON" in (came.error or "")


def test_bytes_of_something_else_are_refused() -> None:
    for data in (b"", b"{}", Columns.of([made()]).to_bytes()):
        with pytest.raises(ValueError, match="not what a rollout worker sends"):
            ended_from_bytes(data)
