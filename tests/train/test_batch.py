"""Tests that episodes become branches with advantages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.core.registry import load
from agentrl.train.batch import Batch, TrainBatch
from agentrl.train.branches import Branch, token_ids, tokens_of


def episode(group: str, reward: float | None, answer: list[int], **changes: object) -> Episode:
    count = len(answer)
    nodes = [
        Node(
            parent=None, message={"role": "user"}, token_ids=[1, 2], loss_mask=[0, 0],
            logprobs=[0, 0], versions=[-1, -1],
        ),
        Node(
            parent=0, message={"role": "assistant"}, token_ids=answer, loss_mask=[1] * count,
            logprobs=[-1.0] * count, versions=[0] * count, finish_reason="stop",
        ),
    ]  # fmt: skip
    fields = {"stop_reason": StopReason.TERMINATED, "trajectories": {"assistant": Trajectory(nodes=nodes)}}
    return Episode(group_id=group, task_id="t", index=0, seed=0, reward=reward, **(fields | changes))  # type: ignore[arg-type]


def make_train_batch(
    episodes: list[Episode], config: TrainerConfig, rewards: RewardConfig | None = None, **more: Any
) -> TrainBatch:
    return Batch(Columns.of(episodes), config, rewards).train_batch(**more)


def ids_of(batch: TrainBatch) -> list[list[int]]:
    return [token_ids(branch, batch.tokens).tolist() for branch in batch.branches]


def trained(batch: TrainBatch, branch: Branch, name: str = "advantages") -> list[float]:
    """Returns a column of the tokens that a branch trains."""
    return batch.tokens.sampled[name][tokens_of(branch, batch.tokens).own].tolist()


def last_advantages(batch: TrainBatch) -> list[float]:
    return [trained(batch, branch)[-1] for branch in batch.branches]


def test_failed_episodes_enter_neither_the_baseline_nor_the_tokens() -> None:
    good = [episode("g", 1.0, [5]), episode("g", 0.0, [6, 7])]
    bad = [episode("g", None, [8]), episode("g", None, [9], stop_reason=StopReason.TIMEOUT)]
    with_bad, without = (make_train_batch(some, TrainerConfig()) for some in ([*good, *bad], good))
    assert ids_of(with_bad) == ids_of(without) and last_advantages(with_bad) == last_advantages(without)
    assert (with_bad.normalizer, with_bad.signal) == (without.normalizer, without.signal)
    assert make_train_batch([*good, *bad], TrainerConfig(aggregation="token")).normalizer == 3


def test_sequences_without_advantage_count_as_tokens_but_are_not_computed() -> None:
    episodes = [episode("g", 1.0, [5]), episode("g", 0.0, [6]), episode("h", 1.0, [7, 7]), episode("h", 1.0, [8])]
    batch = make_train_batch(episodes, TrainerConfig(aggregation="token"))
    assert (len(batch.branches), batch.normalizer, batch.signal) == (2, 5, 0.5)
    assert [token_ids(branch, batch.tokens).tolist()[2:] for branch in batch.idle] == [[7, 7], [8]]
    every = make_train_batch(episodes, TrainerConfig(kl_coef=0.1))
    assert len(every.branches) == 4 and every.idle == []


def test_scale_bias_and_clip_change_what_the_trainer_sees() -> None:
    episodes = [episode("g", 3.0, [5]), episode("g", 1.0, [6]), episode("g", -9.0, [7])]
    config = TrainerConfig(scale_rewards="none")
    rewards = RewardConfig(scale=2.0, bias=1.0, clip=(-1.0, 5.0))
    seen = [5.0, 3.0, -1.0]  # 7, 3 and -17, clipped
    mean = sum(seen) / 3
    advantages = last_advantages(make_train_batch(episodes, config, rewards))
    assert advantages == pytest.approx([value - mean for value in seen])
    with pytest.raises(ValidationError, match="lower bound first"):
        RewardConfig(clip=(1.0, 0.0))


ADVANTAGE = """
seen = []

def steps(scored, config):
    seen.extend(scored)
    return [sum(r or 0 for r in s.step_rewards) - s.reward * s.terminated for s in scored]

def short(scored, config):
    return [0.0]

def broken(scored, config):
    return [float("nan") for _ in scored]
"""


def test_an_advantage_of_ones_own_gets_step_rewards_and_the_kind_of_end(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ADVANTAGE)
    episodes = [episode("g", 3.0, [5]), episode("h", 1.0, [6], stop_reason=StopReason.TRUNCATED)]
    for one, reward in zip(episodes, (0.5, 0.25), strict=True):
        one.trajectories["assistant"].nodes[1].reward = reward
    batch = make_train_batch(episodes, TrainerConfig(advantage=f"{file}:steps"))
    assert last_advantages(batch) == [0.5 - 3.0, 0.25]
    assert [(s.group, s.terminated) for s in load("advantage", f"{file}:steps").__globals__["seen"]] == [
        (("g", "assistant"), True), (("h", "assistant"), False),
    ]  # fmt: skip
    for name in ("short", "broken"):
        with pytest.raises(ValueError, match=f"{name} gave"):
            make_train_batch(episodes, TrainerConfig(advantage=f"{file}:{name}"))


def test_aggregation_decides_weights_and_normalizer() -> None:
    episodes = [episode("g", 1.0, [5]), episode("g", 0.0, [6, 7, 8]), episode("h", 1.0, [7, 7]), episode("h", 0.0, [8])]
    expected = {
        "token": ([1, 1, 1, 1], 7),
        "sequence": ([1, 1 / 3, 1 / 2, 1], 4),
        "constant": ([1, 1, 1, 1], 4 * 10),
        "sum": ([1, 1, 1, 1], 4),
    }
    for aggregation, (weights, normalizer) in expected.items():
        config = TrainerConfig.model_validate({"aggregation": aggregation, "aggregation_length": 10})
        batch = make_train_batch(episodes, config)
        assert ([s.weight for s in batch.branches], batch.normalizer) == (pytest.approx(weights), normalizer)
        assert [s.group for s in batch.branches] == [batch.branches[0].group] * 2 + [batch.branches[2].group] * 2


def test_branches_share_the_weight_of_their_episode() -> None:
    forked = episode("g", 1.0, [5, 5])
    nodes = forked.trajectories["assistant"].nodes
    nodes.append(nodes[1].model_copy(update={"token_ids": [6, 6], "parent": 0}))
    batch = make_train_batch([forked, episode("g", 0.0, [7])], TrainerConfig())
    assert [s.weight for s in batch.branches] == [1 / 4, 1 / 4, 1] and batch.normalizer == 2


def test_masked_episodes_count_in_the_baseline_only() -> None:
    cut = episode("g", 0.0, [6, 7], stop_reason=StopReason.TRUNCATED)
    batch = make_train_batch([episode("g", 1.0, [5]), cut], TrainerConfig(mask_truncated=True, aggregation="token"))
    assert ids_of(batch) == [[1, 2, 5]] and batch.normalizer == 1
    assert last_advantages(batch)[0] == pytest.approx(0.5 / 0.5**0.5, abs=1e-5)


def finished(one: Episode, *reasons: str | None, role: str = "assistant") -> Episode:
    """Sets the finish reasons of the sampled messages of a role."""
    nodes = [node for node in one.trajectories[role].nodes if any(node.loss_mask)]
    for node, reason in zip(nodes, reasons, strict=True):
        node.finish_reason = reason
    return one


def test_dapo_does_not_train_answers_that_end_at_the_length_limit() -> None:
    """Single turns that the environment terminated; the cut one counts in the group's mean."""
    group = [episode("g", 1.0, [5]), finished(episode("g", 0.0, [6, 7]), "length")]
    batch = make_train_batch(group, TrainerConfig(preset="dapo"))
    assert ids_of(batch) == [[1, 2, 5]] and batch.normalizer == 1
    assert last_advantages(batch)[0] == pytest.approx(0.5 / 0.5**0.5, abs=1e-5)
    assert len(make_train_batch(group, TrainerConfig()).branches) == 2, "without the mask it is trained"
    all_cut = [finished(episode("g", reward, [6]), "length") for reward in (0.0, 1.0)]
    assert make_train_batch(all_cut, TrainerConfig(preset="dapo")).branches == []


def test_an_earlier_answer_that_was_cut_masks_nothing() -> None:
    one = episode("g", 1.0, [5])
    nodes = one.trajectories["assistant"].nodes
    nodes += [nodes[0].model_copy(update={"parent": 1}), nodes[1].model_copy(update={"parent": 2, "token_ids": [6]})]
    batch = make_train_batch(
        [finished(one, "length", "stop"), episode("g", 0.0, [7])], TrainerConfig(mask_truncated=True)
    )
    assert ids_of(batch) == [[1, 2, 5, 1, 2, 6], [1, 2, 7]]


def test_only_the_role_that_was_cut_is_masked() -> None:
    episodes = []
    for reward in (1.0, 0.0):
        white, black = (episode("g", reward, answer) for answer in ([5], [6]))
        both = {"white": white.trajectories["assistant"], "black": black.trajectories["assistant"]}
        episodes.append(white.model_copy(update={"trajectories": both}))
    finished(episodes[0], "length", role="white")
    masked = make_train_batch(episodes, TrainerConfig(mask_truncated=True))
    assert ids_of(masked) == [[1, 2, 6], [1, 2, 5], [1, 2, 6]]
    limited = [one.model_copy(update={"stop_reason": StopReason.TRUNCATED}) for one in episodes]
    assert make_train_batch(limited, TrainerConfig(mask_truncated=True)).branches == [], "a limit ends all roles"


def test_an_episode_that_ran_out_of_context_is_trained_unless_cut_ones_are_masked() -> None:
    full = episode("g", 0.0, [6], stop_reason=StopReason.CONTEXT_OVERFLOW)
    nodes = full.trajectories["assistant"].nodes
    nodes.append(nodes[0].model_copy(update={"parent": 1, "token_ids": [8] * 9, "loss_mask": [0] * 9,
                                             "logprobs": [0.0] * 9, "versions": [-1] * 9}))  # fmt: skip
    good = episode("g", 1.0, [5])
    batch = make_train_batch([good, full], TrainerConfig())
    assert [trained(batch, branch) for branch in batch.branches] == [[pytest.approx(0.707, abs=1e-3)],
                                                                     [pytest.approx(-0.707, abs=1e-3)]]  # fmt: skip
    assert ids_of(make_train_batch([good, full], TrainerConfig(mask_truncated=True))) == [[1, 2, 5]]


def test_whitening_is_over_the_tokens_of_the_batch() -> None:
    """Uses the published example: two tokens with 1, one with 2."""
    config = TrainerConfig(preset="reinforce_pp")
    batch = make_train_batch([episode("g", 1.0, [5, 5]), episode("h", 2.0, [6])], config)
    assert last_advantages(batch) == pytest.approx([-0.57735, 1.1547], abs=1e-4)


def test_a_penalty_is_taken_off_before_the_baseline() -> None:
    episodes = [episode("g", 1.0, [5]), episode("g", 1.0, [6, 6])]
    config = TrainerConfig(kl_coef=0.1, kl_in="reward", scale_rewards="none")
    batch = make_train_batch(episodes, config, penalties=np.full(3, 0.1))
    assert last_advantages(batch) == pytest.approx([0.05, -0.05])
