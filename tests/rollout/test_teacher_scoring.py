"""What a teacher is asked, where its answers go, and what becomes of episodes that it cannot score."""

import asyncio
from pathlib import Path

import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.inference.backend import InferenceError
from agentrl.inference.router import Router
from agentrl.rollout.buffer import Group
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.group_account import Tally
from agentrl.rollout.rollout_metrics import batch_metrics
from agentrl.rollout.teacher_scoring import Teacher
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.test_controller import Harness, episodes_of


def make_teacher(*, patience: float = 60.0) -> tuple[Teacher, FakeBackend]:
    backend = FakeBackend(lambda ids, params: answer([1]), "http://teacher")
    return Teacher(Router([backend], patience=patience)), backend


def node(parent: int | None, ids: list[int], mask: list[int]) -> Node:
    logprobs = [-1.0 * m for m in mask]
    return Node(
        parent=parent, message={}, token_ids=ids, loss_mask=mask, logprobs=logprobs, versions=[m - 1 for m in mask]
    )


def episode(*nodes: Node) -> Episode:
    return Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=1.0, stop_reason=StopReason.TERMINATED,
        trajectories={"assistant": Trajectory(nodes=list(nodes))},
    )  # fmt: skip


async def test_each_branch_is_one_request_and_what_branches_share_is_scored_once() -> None:
    teacher, backend = make_teacher()
    fork = episode(
        node(None, [2, 4], [0, 0]),
        node(0, [6, 8], [1, 1]),
        node(1, [10], [0]),
        node(2, [12, 14], [1, 0]),  # the second is a token of the template
        node(1, [20], [1]),
    )
    scored = (await teacher.score(fork)).trajectories["assistant"].nodes
    assert [n.teacher_logprobs for n in scored] == [[], [-3.0, -4.0], [], [-6.0, 0.0], [-10.0]]
    assert backend.scored == [([2, 4, 6, 8, 10, 12, 14], 2), ([2, 4, 6, 8, 20], 4)]
    ended = [n.model_copy(update={"finish_reason": "stop"}) if any(n.loss_mask) else n for n in scored]
    group = Group(0, Columns.of([episode(*ended)]), Tally("kept"))
    metrics = batch_metrics([group], 0, RewardConfig())
    assert metrics["distill/reverse_kl"] == pytest.approx((2 + 3 + 5 + 9) / 4)
    backend.dead = False
    await teacher.close()


async def test_a_prompt_that_did_not_fit_is_not_sent_to_the_teacher() -> None:
    teacher, backend = make_teacher()
    await teacher.score(episode(node(None, [2, 4], [0, 0]), node(0, [6], [1]), node(1, [9] * 99, [0] * 99)))
    assert backend.scored == [([2, 4, 6], 2)]
    await teacher.close()


async def test_an_episode_that_failed_is_not_scored_and_one_that_cannot_be_has_failed() -> None:
    teacher, backend = make_teacher(patience=0.01)
    failed = episode(node(None, [2, 4], [0, 1])).model_copy(update={"reward": None})
    assert await teacher.score(failed) is failed and backend.scored == []
    backend.dead = True
    lost = await teacher.score(episode(node(None, [2, 4], [0, 1])))
    assert lost.failed and lost.stop_reason is StopReason.INFERENCE_ERROR
    assert "the teacher did not score the episode" in str(lost.error) and "http://teacher" in str(lost.error)
    backend.dead = False
    await teacher.close()


async def test_a_teacher_that_does_not_answer_is_told_at_the_start() -> None:
    teacher, backend = make_teacher()
    backend.dead = True
    with pytest.raises(InferenceError, match="the teacher does not score: http://teacher is dead"):
        await teacher.start()
    backend.dead = False
    await teacher.close()


async def test_a_teacher_that_dies_ends_the_run_with_one_message(tiny_model: Path, tmp_path: Path) -> None:
    teacher, backend = make_teacher(patience=0.01)
    harness = Harness(tmp_path, tiny_model, "rollout.group_size=1", "trainer.advantage=reward")
    harness.controller.rollouts.score = teacher.score
    await teacher.start()
    harness.controller.start()
    batch = await asyncio.wait_for(harness.controller.next_batch(0), 30)
    nodes = [n for e in episodes_of(batch) for n in e.trajectories["assistant"].nodes if any(n.loss_mask)]
    assert [(n.teacher_logprobs or [])[:2] for n in nodes] == [[-2.5, -3.0]] * 2
    backend.dead = True
    await harness.publish(1)
    with pytest.raises(RolloutError, match=r"(?s)latest 2 episodes failed.*teacher did not score.*http://teacher"):
        for step in (1, 2, 3):
            await asyncio.wait_for(harness.controller.next_batch(step), 30)
    await harness.controller.close()
    backend.dead = False
    await teacher.close()
