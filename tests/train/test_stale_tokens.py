"""Tokens older than the staleness bound carry no loss and count in no denominator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.recipe import TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Node, StopReason, Trajectory
from agentrl.train.batch import Batch, TrainBatch
from agentrl.train.branches import tokens_of
from tests.train.test_trainer_end import make_trainer
from tests.train.toy_policy import make_engine, sample

OLDEST = 5
CHOICES: dict[str, dict[str, Any]] = {
    "mean over tokens": {"aggregation": "token"},
    "mean of sequences": {"aggregation": "sequence"},
    "sum by a constant": {"aggregation": "constant"},
    "whitened": {"preset": "reinforce_pp_baseline"},
    "ratio of the sequence": {"preset": "gspo"},
    "recomputed, with weights": {"preset": "decoupled"},
    "a selection over the batch": {"preset": "m2po"},
    "a reference, an entropy bonus": {"kl_coef": 0.1, "entropy_coef": 0.01},
}


def half_old(episodes: list[Episode]) -> list[Episode]:
    """Gives each answer's first tokens an old version: of none to all of them."""
    for number, episode in enumerate(episodes):
        node = episode.trajectories["assistant"].nodes[1]
        old = number % (len(node.token_ids) + 1)
        node.versions = [OLDEST - 1] * old + [OLDEST] * (len(node.token_ids) - old)
    return episodes


def not_sampled(episodes: list[Episode]) -> list[Episode]:
    """The same answers, whose old tokens no policy sampled."""
    found = [episode.model_copy(deep=True) for episode in episodes]
    for episode in found:
        node = episode.trajectories["assistant"].nodes[1]
        node.loss_mask = [int(version >= OLDEST) for version in node.versions]
    return found


@pytest.mark.parametrize("name", CHOICES)
def test_an_update_is_that_of_a_batch_in_which_nobody_sampled_the_old_tokens(
    name: str, tiny_model: Path, mesh: DeviceMesh
) -> None:
    results = []
    for masks in (True, False):
        engine = make_engine(tiny_model, CHOICES[name])
        episodes = half_old(sample(engine.policy, 0, torch.Generator().manual_seed(0)))
        columns = Columns.of(episodes if masks else not_sampled(episodes))
        batch = Batch(columns, engine.config).train_batch(version=6, oldest=OLDEST if masks else None)
        assert set(batch.tokens.sampled["versions"].tolist()) == {OLDEST}
        metrics = engine.update(batch, 1e-2)
        results.append((metrics, [parameter.detach().clone() for parameter in engine.policy.parameters()]))
    (masked, ours), (plain, theirs) = results
    assert masked == pytest.approx(plain, nan_ok=True) and masked["train/loss"] == masked["train/loss"]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def turns(reward: float, *answers: list[int], rewards: tuple[float, ...] = ()) -> Episode:
    """An episode with an answer for each list of versions."""
    nodes: list[Node] = []
    for number, versions in enumerate(answers):
        count = len(versions)
        nodes.append(
            Node(parent=len(nodes) - 1 if nodes else None, message={}, token_ids=[1], loss_mask=[0], logprobs=[0.0],
                 versions=[-1])
        )  # fmt: skip
        nodes.append(
            Node(parent=len(nodes) - 1, message={}, token_ids=[3] * count, loss_mask=[1] * count,
                 logprobs=[-1.0] * count, versions=versions, finish_reason="stop",
                 reward=rewards[number] if rewards else None)
        )  # fmt: skip
    return Episode(
        group_id="g", task_id="t", index=0, seed=0, reward=reward, stop_reason=StopReason.TERMINATED,
        trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


def made(episodes: list[Episode], oldest: int | None, **choices: Any) -> TrainBatch:
    return Batch(Columns.of(episodes), TrainerConfig.model_validate(choices)).train_batch(version=6, oldest=oldest)


def advantages(batch: TrainBatch) -> list[list[float]]:
    return [batch.tokens.sampled["advantages"][tokens_of(one, batch.tokens).own].tolist() for one in batch.branches]


def test_the_rewards_of_old_turns_keep_their_place_in_the_credit() -> None:
    """A turn without a loss still earned its reward, and the turns before it still earned that, too."""
    episodes = [
        turns(3.0, [5, 5], [4, 4], [4, 5], rewards=(0.0, 2.0, 1.0)),
        turns(0.0, [5], [5], [5], rewards=(0.0, 0.0, 0.0)),
    ]
    choices = {"advantage": "turns", "scale_rewards": "none", "discount": 0.5, "aggregation": "token"}
    whole, left = made(episodes, None, **choices), made(episodes, OLDEST, **choices)
    first = advantages(whole)[0]
    assert advantages(left)[0] == pytest.approx([first[0], first[1], first[5]])
    assert (whole.normalizer, left.normalizer) == (9.0, 6.0)


def test_an_episode_without_a_young_token_counts_in_the_baseline_alone() -> None:
    episodes = [turns(1.0, [4, 4]), turns(0.0, [5, 5]), turns(0.5, [4, 5])]
    choices = {"scale_rewards": "none", "aggregation": "sequence"}
    batch = made(episodes, OLDEST, **choices)
    assert advantages(batch) == [[-0.5, -0.5]] and batch.normalizer == 2.0
    assert [branch.weight for branch in (*batch.branches, *batch.idle)] == [0.5, 1.0]
    np.testing.assert_array_equal(batch.tokens.sampled["versions"], [5, 5, 5])
    nothing = made(episodes, 6, **choices)
    assert not nothing.branches and not nothing.idle and nothing.normalizer == 1.0


def test_the_critic_learns_from_young_tokens_alone_and_values_all() -> None:
    config = TrainerConfig(preset="ppo", whiten="none", gae_lambda=1.0)
    columns = Columns.of([turns(1.0, [4, 5])])
    batch = Batch(columns, config).train_batch(version=6, values=np.array([0.25, 0.5, 0.0]), oldest=OLDEST)
    whole = Batch(columns, config).train_batch(version=6, values=np.array([0.25, 0.5, 0.0]))
    for name in ("advantages", "values", "returns"):
        assert batch.tokens.sampled[name].tolist() == whole.tokens.sampled[name][1:].tolist()
    assert len(batch.valued) == 1 and batch.tokens.total == 1


def test_the_trainer_masks_what_the_controller_says(tiny_model: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    trainer, _, _ = make_trainer(tiny_model, tmp_path, {"kl_coef": 0.1})  # counts all tokens
    facts = {"last": False, "done": 0.0, "epochs": 0, "epochs_before": 0}
    columns = Columns.of(half_old(sample(trainer.engine.policy, 0, torch.Generator().manual_seed(0))))
    counts = []
    for oldest in (None, OLDEST):
        plan = trainer._decide({**facts, "oldest_version": oldest}, 0.0)
        counts.append(trainer.update(columns, plan["learning_rate"], oldest=plan["oldest_version"])["train/tokens"])
    assert counts == [len(columns.versions), (columns.versions >= OLDEST).sum()] and counts[1] < counts[0]
