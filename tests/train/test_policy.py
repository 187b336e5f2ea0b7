"""The sharded policy against the plain model: trees, splits, heads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch import TrainBatch
from agentrl.train.engine import TrainEngine
from agentrl.train.packing import TrainSequence, build_rows
from agentrl.train.policy import Policy, check_head, collate, load_model, shard
from tests.train.test_packing import random_sequences

CPU = torch.device("cpu")
TEMPERATURE = 0.8


def make_policy(folder: Path, mesh: DeviceMesh) -> Policy:
    policy = Policy(load_model(folder), TEMPERATURE, 16)
    shard(policy, mesh, torch.float32)
    return policy


def plain_logprobs(model: torch.nn.Module, sequence: TrainSequence) -> list[Tensor]:
    logits = model(input_ids=torch.tensor([list(sequence.token_ids)]), use_cache=False).logits[0] / TEMPERATURE
    logprobs = logits.log_softmax(-1)
    return [logprobs[i - 1, sequence.token_ids[i]] for i, m in enumerate(sequence.loss_mask) if m]


@pytest.fixture
def sequences(tiny_model: Path, mesh: DeviceMesh) -> list[TrainSequence]:
    """With behavior logprobs of the model itself, and one with two turns."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    found = random_sequences(5, 6)
    turns = TrainSequence([4, 9, 8, 7, 6, 5, 3], [0, 1, 1, 0, 0, 1, 0], [0.0] * 7, 1.0)
    filled = []
    for index, s in enumerate([*found, turns]):
        values = iter([v.item() for v in plain_logprobs(model, s)])
        logprobs = [next(values) if m else 0.0 for m in s.loss_mask]
        filled.append(TrainSequence(s.token_ids, s.loss_mask, logprobs, (-1.0) ** index))
    return filled


def test_a_packed_tree_gives_the_logprobs_of_the_plain_model(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    rows = build_rows(sequences, 200)
    apart = sum(len(row) for row in build_rows(sequences, 1))
    assert sum(map(len, rows)) < 0.8 * apart, "little is shared: the test shows little"
    batch = collate(rows, CPU)
    with torch.no_grad():
        logprobs, _ = make_policy(tiny_model, mesh)(batch)
    torch.testing.assert_close(logprobs, batch.logprobs, atol=1e-5, rtol=0)


def gradients(folder: Path, mesh: DeviceMesh, sequences: list[TrainSequence], budget: int) -> tuple[float, Tensor]:
    config = TrainerConfig(tokens_per_microbatch=budget, learning_rate=1.0, logprob_chunk=16)
    engine = TrainEngine(make_policy(folder, mesh), None, config, CPU)
    captured: list[Tensor] = []

    def capture(_: bool) -> dict[str, float]:
        grads = [p.grad for p in engine.policy.parameters() if p.grad is not None]
        captured.append(torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads]))
        return {}

    engine._apply_gradients = capture  # type: ignore[method-assign]
    tokens = sum(sum(s.loss_mask) for s in sequences)
    metrics = engine.update(TrainBatch(sequences, tokens, 1.0), 1e-3)
    return metrics["train/loss"], captured[0]


@pytest.mark.parametrize("budget", [1, 60, 150])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence], budget: int
) -> None:
    loss, gradient = gradients(tiny_model, mesh, sequences, budget)
    whole_loss, whole_gradient = gradients(tiny_model, mesh, sequences, 100_000)
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-5, rtol=1e-4)


def test_the_gradient_is_that_of_the_plain_objective(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    _, gradient = gradients(tiny_model, mesh, sequences, 150)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    total = torch.stack(
        [
            -s.advantage * value / value.detach() * value.detach()
            for s in sequences
            for value in plain_logprobs(model, s)
        ]
    ).sum()  # at ratio 1 the clipped surrogate's gradient is -advantage * grad logprob
    (total / sum(sum(s.loss_mask) for s in sequences)).backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient.sort().values, plain.sort().values, atol=1e-5, rtol=1e-3)


def test_ratio_is_one_before_the_first_update(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    engine = TrainEngine(make_policy(tiny_model, mesh), None, TrainerConfig(learning_rate=1e-3), CPU)
    batch = TrainBatch(sequences, 100, 1.0)
    first = engine.update(batch, 1e-3)
    second = engine.update(batch, 1e-3)
    assert first["train/ratio_deviation_max"] < 1e-4
    assert second["train/ratio_deviation_max"] > 1e-3, "the update changed nothing"


def test_a_non_finite_gradient_leaves_the_parameters_alone(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    engine = TrainEngine(make_policy(tiny_model, mesh), None, TrainerConfig(learning_rate=1e-3), CPU)
    before = [p.detach().clone() for p in engine.policy.parameters()]
    bad = [TrainSequence(s.token_ids, s.loss_mask, s.logprobs, float("nan")) for s in sequences]
    metrics = engine.update(TrainBatch(bad, 100, 1.0), 1e-3)
    assert metrics["train/skipped"] == 1.0
    for old, new in zip(before, engine.policy.parameters(), strict=True):
        assert torch.equal(old.to_local(), new.detach().to_local())


def test_kl_to_the_reference_is_zero_at_first_and_pulls_back_later(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    config = TrainerConfig(learning_rate=1e-2, kl_coef=0.1)
    reference = make_policy(tiny_model, mesh).requires_grad_(False)
    engine = TrainEngine(make_policy(tiny_model, mesh), reference, config, CPU)
    batch = TrainBatch(sequences, 100, 1.0)
    assert engine.update(batch, 1e-2)["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert engine.update(batch, 1e-2)["train/kl_reference"] > 1e-4


def test_an_entropy_bonus_alone_raises_the_entropy(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    engine = TrainEngine(make_policy(tiny_model, mesh), None, TrainerConfig(entropy_coef=0.1), CPU)
    level = [TrainSequence(s.token_ids, s.loss_mask, s.logprobs, 0.0) for s in sequences]
    entropies = [engine.update(TrainBatch(level, 100, 0.0), 1e-3)["train/entropy"] for _ in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]


def test_a_model_that_caps_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.1, initializer_range=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="changes its logits"):
        check_head(Gemma2ForCausalLM(config))
