"""Tests the critic: its loss, its inputs, that it learns, and that splitting a batch does not change the result."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from agentrl.bench.made_batch import TrainSequence, made_batch, made_tokens
from agentrl.config.recipe import RewardConfig, TrainerConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import StopReason
from agentrl.train.batch import Batch
from agentrl.train.branches import tokens_of
from agentrl.train.critic import Critic, ValueLearner, value_loss
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import Policy, load_model, reshard, shard
from tests.train.test_batch import episode, trained
from tests.train.test_rows import random_sequences

CPU = torch.device("cpu")


def learner(folder: Path, mesh: DeviceMesh, **choices: object) -> ValueLearner:
    """Makes a critic's learner, sharded as in a run on several ranks."""
    critic = Critic(load_model(folder).get_decoder())
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    shard(critic, mesh, torch.float32)
    return ValueLearner(critic, TrainerConfig.model_validate({"preset": "ppo", **choices}), CPU)


def by_sequence(made: ValueLearner, sequences: list[TrainSequence]) -> list[list[float]]:
    """Returns the values before the trained tokens of each sequence."""
    branches, tokens = made_tokens(sequences)
    parts = np.split(made.values(branches, tokens), tokens.sampled_starts[1:-1])
    return [part.tolist() for part in parts]


def test_the_loss_is_the_published_one() -> None:
    loss = value_loss(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([1.0, 0.0]), 0.2)
    assert loss.mean().item() == pytest.approx(0.41)
    free = value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), None)
    assert free.item() == pytest.approx(0.125)


def test_each_sampled_token_gets_its_value_and_a_cut_end_one_more() -> None:
    """A fork whose second branch was cut off; the value that is asked for is the number of the token's place."""
    cut = episode("g", 1.0, [5, 6], stop_reason=StopReason.TRUNCATED)
    nodes = cut.trajectories["assistant"].nodes
    nodes[1].reward = 0.5
    nodes.append(nodes[0].model_copy(update={"parent": 1, "token_ids": [7, 7]}))
    nodes.append(nodes[1].model_copy(update={"parent": 2, "token_ids": [8, 8], "reward": None}))
    nodes.append(nodes[1].model_copy(update={"parent": 1, "token_ids": [9, 9], "reward": 4.0}))
    config = TrainerConfig(preset="ppo", whiten="none", gae_lambda=0.0)
    columns = Columns.of([cut, episode("h", 2.0, [3])])
    batch = Batch(columns, config, RewardConfig(scale=2.0))
    asked = batch.asked_values()
    values = np.zeros(batch.tokens.total + 2)
    for branch in asked:
        found = tokens_of(branch, batch.tokens)
        values[found.places] = found.positions
    assert [tokens_of(b, batch.tokens).token_ids.tolist() for b in asked] == [
        [1, 2, 5, 6, 7, 7, 8, 8], [1, 2, 5, 6, 9, 9, 0], [1, 2, 3],
    ]  # fmt: skip
    made = batch.train_batch(values=values)
    assert made.valued == made.branches and len(made.valued) == 3
    first, second, other = made.valued
    assert trained(made, first, "values") == [2, 3, 6, 7] and trained(made, second, "values") == [4, 5]
    # seen rewards: 1 and 8 in steps, 2 in all: -7 more at the end of both branches; lambda 0: one step ahead only
    assert trained(made, first, "returns") == [3, 1 + (6 + 4) / 2, 7, -7]
    assert trained(made, second, "returns") == [5, 8 - 7 + 6]
    assert trained(made, other, "returns") == [4]
    for branch in made.valued:
        returns, before = trained(made, branch, "returns"), trained(made, branch, "values")
        assert trained(made, branch) == [r - v for r, v in zip(returns, before, strict=True)]


def gae_reference(rewards: list[float], values: list[float], after: float, decay: float) -> list[float]:
    """Returns the generalised advantages of one sequence in float64, from their definition as a sum."""
    ahead = [*values[1:], after]
    deltas = [r + v_next - v for r, v_next, v in zip(rewards, ahead, values, strict=True)]
    return [sum(decay**j * delta for j, delta in enumerate(deltas[start:])) for start in range(len(deltas))]


@pytest.mark.parametrize("end", ["stop", "length", "overflow"])
def test_what_follows_a_cut_answer_is_valued_by_the_critic(end: str) -> None:
    """The environment terminated after a cut answer, or the context was full: the value of its end is bootstrapped."""
    one = episode("g", 0.25, [5, 6, 7])
    nodes = one.trajectories["assistant"].nodes
    nodes[1].finish_reason = "stop" if end == "overflow" else end
    nodes[1].reward = 0.25
    if end == "overflow":  # the prompt that did not fit is stored after the answer
        nodes.append(nodes[0].model_copy(update={"parent": 1, "token_ids": [9, 9]}))
        one = one.model_copy(update={"stop_reason": StopReason.CONTEXT_OVERFLOW})
    batch = Batch(Columns.of([one]), TrainerConfig(preset="ppo", whiten="none", gae_lambda=0.9))
    (asked,) = batch.asked_values()
    found = tokens_of(asked, batch.tokens)
    assert found.token_ids.tolist() == [1, 2, 5, 6, 7] + [0] * (end != "stop"), "nothing of what did not fit"
    assert found.positions.tolist() == [2, 3, 4] + [5] * (end != "stop"), "one more value is asked for after the cut"
    values = np.zeros(batch.tokens.total + 1)
    values[found.places] = [0.3, -0.2, 0.6, 0.9][: len(found.places)]
    made = batch.train_batch(values=values)
    after = 0.0 if end == "stop" else 0.9
    expected = gae_reference([0.0, 0.0, 0.25], [0.3, -0.2, 0.6], after, 0.9)
    assert trained(made, made.branches[0]) == pytest.approx(expected, abs=1e-6)


def test_each_of_several_cut_answers_to_the_last_prompt_has_its_own_value() -> None:
    one = episode("g", 0.0, [5, 6])
    nodes = one.trajectories["assistant"].nodes
    nodes[1].finish_reason = "length"
    nodes.append(nodes[1].model_copy(update={"token_ids": [7, 7]}))
    batch = Batch(Columns.of([episode("h", 0.0, [3]), one]), TrainerConfig(preset="ppo", whiten="none", gae_lambda=0.0))
    asked = [branch for branch in batch.asked_values() if branch.bootstrap is not None]
    assert [branch.bootstrap for branch in asked] == [batch.tokens.total + 1, batch.tokens.total + 2]
    values = np.arange(batch.tokens.total + 3, dtype=float) ** 2
    made = batch.train_batch(values=values)
    assert [trained(made, branch, "returns")[-1] for branch in made.valued] == [0.0, 36.0, 49.0]


def test_values_and_updates_do_not_depend_on_the_micro_batches(tiny_model: Path, mesh: DeviceMesh) -> None:
    rng = random.Random(0)
    sequences = [
        TrainSequence(
            s.token_ids, s.loss_mask, s.logprobs, s.advantages, group=i // 3,
            values=[rng.gauss(0, 1) for _ in s.token_ids], returns=[rng.gauss(0, 1) for _ in s.token_ids],
        )
        for i, s in enumerate(random_sequences(3, 6))
    ]  # fmt: skip
    results = []
    for budget in (1, 90, 100_000):
        made = learner(tiny_model, mesh, tokens_per_microbatch=budget, minibatches=2, critic_learning_rate=1e-3)
        before = made.values(*made_tokens(sequences)).tolist()
        metrics = made.update(made_batch(sequences, 1.0), 1.0)
        results.append((before, made.values(*made_tokens(sequences)).tolist(), metrics))
    (first, moved, metrics), *others = results
    assert first != pytest.approx(moved, abs=1e-3), "the update changed nothing"
    for again, moved_again, metrics_again in others:
        assert again == pytest.approx(first, abs=1e-5)
        assert moved_again == pytest.approx(moved, abs=2e-4)
        assert metrics_again == pytest.approx(metrics, rel=1e-3)


def test_a_critic_sees_what_comes_before_a_token_and_nothing_else(tiny_model: Path, mesh: DeviceMesh) -> None:
    """Compares values with those of the plain decoder on each sequence alone."""
    made = learner(tiny_model, mesh)
    sequences = random_sequences(7, 4)
    found = by_sequence(made, sequences)
    decoder = load_model(tiny_model).get_decoder()
    reshard(made.critic)
    head = made.critic.head.weight.detach().full_tensor()  # type: ignore[attr-defined]
    for sequence, values in zip(sequences, found, strict=True):
        hidden = decoder(input_ids=torch.tensor([list(sequence.token_ids)])).last_hidden_state[0] @ head[0]
        expected = [hidden[i - 1].item() for i, m in enumerate(sequence.loss_mask) if m]
        assert values == pytest.approx(expected, abs=1e-5)


def test_returns_are_learned(tiny_model: Path, mesh: DeviceMesh) -> None:
    """The return of every token is 1 if the prompt's last token is even, else 0."""
    made = learner(tiny_model, mesh, critic_learning_rate=3e-3, critic_clip=None)
    plain = [s for s in random_sequences(11, 12) if len(s.token_ids) > 3]
    explained = []
    for _ in range(25):
        values = by_sequence(made, plain)
        sequences = []
        for s, of_one in zip(plain, values, strict=True):
            prompt = s.loss_mask.index(1)
            fill = iter(of_one)
            filled = [next(fill) if m else 0.0 for m in s.loss_mask]
            target = float(s.token_ids[prompt - 1] % 2 == 0)
            returns = [target * m for m in s.loss_mask]
            sequences.append(TrainSequence(s.token_ids, s.loss_mask, s.logprobs, (), values=filled, returns=returns))
        explained.append(made.update(made_batch(sequences, 1.0), 1.0)["critic/explained"])
    assert explained[0] < 0.2 and explained[-1] > 0.8, explained


def test_the_policy_waits_while_the_critic_warms_up(tiny_model: Path, mesh: DeviceMesh) -> None:
    config = TrainerConfig(preset="ppo", critic_warmup=1)
    engine = PolicyLearner(Policy(load_model(tiny_model), 1.0, 64), None, config, CPU, learner(tiny_model, mesh))
    s = random_sequences(3, 1)
    sequences = [
        TrainSequence(x.token_ids, x.loss_mask, x.logprobs, x.advantages, values=x.advantages, returns=x.advantages)
        for x in s
    ]
    before = [p.detach().clone() for p in engine.policy.parameters()]
    for version, moved in ((0, False), (1, True)):
        metrics = engine.update(made_batch(sequences, 1.0, 1.0, version), 1e-3)
        assert metrics["train/skipped"] == metrics.get("critic/warmup", 0.0) == float(not moved)
        assert metrics["critic/grad_norm"] > 0
        same = all(torch.equal(old, new) for old, new in zip(before, engine.policy.parameters(), strict=True))
        assert same != moved


def test_an_engine_needs_a_critic_exactly_for_gae(tiny_model: Path, mesh: DeviceMesh) -> None:
    policy = Policy(load_model(tiny_model), 1.0, 64)
    with pytest.raises(ValueError, match="gae needs a critic"):
        PolicyLearner(policy, None, TrainerConfig(preset="ppo"), CPU)
    with pytest.raises(ValueError, match="gae needs a critic"):
        PolicyLearner(policy, None, TrainerConfig(), CPU, learner(tiny_model, mesh))
