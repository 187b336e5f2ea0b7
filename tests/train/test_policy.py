"""Tests the sharded policy against the plain model: prefix trees, splits of a batch, output heads."""

import copy
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from agentrl.bench.made_batch import TrainSequence, made_batch, made_tokens
from agentrl.config.recipe import TrainerConfig
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import (
    Policy,
    compile_layers,
    compute_in,
    decoder_layers,
    load_model,
    reshard,
    shard,
)
from agentrl.train.row_attention import choose_attention
from agentrl.train.shares import share_out
from tests.train.test_rows import collated, random_sequences, rows_of

CPU = torch.device("cpu")
TEMPERATURE = 0.8


def make_policy(
    folder: Path,
    mesh: DeviceMesh,
    *,
    gradient_checkpointing: bool = False,
    config: TrainerConfig | None = None,
) -> Policy:
    model = load_model(folder, gradient_checkpointing=gradient_checkpointing)
    choose_attention(model, config or TrainerConfig(), CPU)
    policy = Policy(model, TEMPERATURE, 16)
    shard(policy, mesh, torch.float32)
    return policy


def plain_logprobs(model: torch.nn.Module, sequence: TrainSequence) -> list[Tensor]:
    logits = model(input_ids=torch.tensor([list(sequence.token_ids)]), use_cache=False).logits[0] / TEMPERATURE
    logprobs = logits.log_softmax(-1)
    return [logprobs[i - 1, sequence.token_ids[i]] for i, m in enumerate(sequence.loss_mask) if m]


@pytest.fixture
def sequences(tiny_model: Path, mesh: DeviceMesh) -> list[TrainSequence]:
    """Makes sequences with the model's logprobs as behavior logprobs, one of them with two turns."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    found = random_sequences(5, 6)
    turns = TrainSequence([4, 9, 8, 7, 6, 5, 3], [0, 1, 1, 0, 0, 1, 0], [0.0] * 7, [1.0] * 7)
    filled = []
    for index, s in enumerate([*found, turns]):
        values = iter([v.item() for v in plain_logprobs(model, s)])
        logprobs = [next(values) if m else 0.0 for m in s.loss_mask]
        filled.append(TrainSequence(s.token_ids, s.loss_mask, logprobs, [(-1.0) ** index] * len(logprobs)))
    return filled


def test_a_packed_tree_gives_the_logprobs_of_the_plain_model(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    apart = sum(len(row) for row in rows_of(sequences, 1))
    assert sum(map(len, rows_of(sequences, 200))) < 0.8 * apart, "little is shared: the test shows little"
    batch = collated(sequences, 200)
    with torch.no_grad():
        logprobs, _ = make_policy(tiny_model, mesh)(batch)
    torch.testing.assert_close(logprobs, batch.columns["behavior"], atol=1e-5, rtol=0)


def gradients(
    folder: Path, mesh: DeviceMesh, sequences: list[TrainSequence], budget: int, choices: dict[str, Any] | None = None
) -> tuple[float, Tensor]:
    """Returns the loss of a step and the gradients of all its updates; parameters do not change."""
    given = {"tokens_per_microbatch": budget, "learning_rate": 1.0, "logprob_chunk": 16, **(choices or {})}
    config = TrainerConfig.model_validate(given)
    made = partial(make_policy, folder, mesh, config=config)
    reference = made().requires_grad_(False) if config.kl_coef else None
    return captured(PolicyLearner(made(), reference, config, CPU), sequences)


def captured(engine: PolicyLearner, sequences: list[TrainSequence]) -> tuple[float, Tensor]:
    """See :func:`gradients`."""
    found: list[Tensor] = []

    def capture(_: bool) -> dict[str, float]:
        grads = [p.grad for p in engine.policy.parameters() if p.grad is not None]
        found.append(torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads]))
        engine.optimizer.zero_grad()
        return {}

    engine._apply_gradients = capture  # type: ignore[method-assign]
    tokens = sum(sum(s.loss_mask) for s in sequences)
    metrics = engine.update(made_batch(sequences, tokens, 1.0, version=4), 1e-3)
    return metrics["train/loss"], torch.cat(found)


choices = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(["clip", "dual_clip", "cispo", "sapo", "dppo", "policy_gradient"]),
        "ratio": st.sampled_from(["token", "sequence"]),
        "proximal": st.sampled_from(["behavior", "recomputed", "log_linear"]),
        "correction": st.sampled_from(["none", "weight", "truncate", "mask"]),
        "correction_level": st.sampled_from(["token", "sequence"]),
        "correction_cap": st.sampled_from([1.0, 1.3]),
        "m2_threshold": st.sampled_from([None, 0.02]),
        "token_mask_low": st.sampled_from([None, 0.9]),
        "token_mask_high": st.sampled_from([None, 1.2]),
        "kl_coef": st.sampled_from([0.0, 0.3]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "kl_gradient": st.sampled_from(["unbiased", "weighted", "plain"]),
        "entropy_coef": st.sampled_from([0.0, 0.2]),
        "minibatches": st.sampled_from([1, 3]),
        "clip_eps": st.sampled_from([0.05, 0.2]),
    }
)
rejections: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {}, {"reject_by": "geometric", "reject_low": 0.95, "reject_high": 1.05}, {"reject_by": "k1", "reject_low": 0.0},
        {"reject_by": "k2", "reject_high": 0.02}, {"reject_by": "k3", "reject_high": 0.02},
    ]
)  # fmt: skip
covariances: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"clip_cov": 0.2, "clip_cov_low": 0.1}, {"kl_cov": 0.2, "kl_cov_coef": 0.5}]
)


@settings(
    max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)  # fmt: skip
@given(
    given=st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, choices, rejections, covariances),
    budget=st.sampled_from([1, 50, 120]),
    seed=st.integers(0, 100),
)
def test_no_choice_of_the_objective_depends_on_the_micro_batches(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence], given: dict[str, Any], budget: int, seed: int
) -> None:
    try:
        TrainerConfig.model_validate(given)
    except ValidationError:
        assume(False)
    rng = random.Random(seed)
    shifted = [  # away from ratio 1, of several versions, groups and weights
        TrainSequence(
            s.token_ids, s.loss_mask, [p + rng.gauss(0, 0.2) for p in s.logprobs],
            [rng.gauss(0, 1) for _ in s.token_ids], rng.random(), [rng.randrange(5) for _ in s.token_ids], index // 3,
        )
        for index, s in enumerate(sequences)
    ]  # fmt: skip
    loss, gradient = gradients(tiny_model, mesh, shifted, budget, given)
    whole_loss, whole_gradient = gradients(tiny_model, mesh, shifted, 100_000, given)
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(gradient, whole_gradient, atol=2e-5, rtol=1e-3)


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
            -s.advantages[0] * value / value.detach() * value.detach()
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
    engine = PolicyLearner(make_policy(tiny_model, mesh), None, TrainerConfig(learning_rate=1e-3), CPU)
    batch = made_batch(sequences, 100, 1.0)
    first = engine.update(batch, 1e-3)
    second = engine.update(batch, 1e-3)
    assert first["mismatch/ratio_max"] < 1e-4
    assert second["mismatch/ratio_max"] > 1e-3, "the update changed nothing"


def test_a_non_finite_gradient_leaves_the_parameters_alone(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    engine = PolicyLearner(make_policy(tiny_model, mesh), None, TrainerConfig(learning_rate=1e-3), CPU)
    before = [p.detach().clone() for p in engine.policy.parameters()]
    bad = [TrainSequence(s.token_ids, s.loss_mask, s.logprobs, [float("nan")] * len(s.token_ids)) for s in sequences]
    metrics = engine.update(made_batch(bad, 100, 1.0), 1e-3)
    assert metrics["train/skipped"] == metrics["train/nonfinite"] == 1.0
    for old, new in zip(before, engine.policy.parameters(), strict=True):
        assert torch.equal(old.to_local(), new.detach().to_local())


@pytest.mark.parametrize("choices", [{}, {"preset": "m2po"}, {"preset": "decoupled"}])
def test_a_batch_without_signal_changes_nothing(tiny_model: Path, mesh: DeviceMesh, choices: dict[str, Any]) -> None:
    engine = PolicyLearner(make_policy(tiny_model, mesh), None, TrainerConfig.model_validate(choices), CPU)
    metrics = engine.update(made_batch([], 1.0, 0.0), 1e-3)
    assert (metrics["train/skipped"], metrics["train/tokens"]) == (1.0, 0.0)


def test_kl_to_the_reference_is_zero_at_first_and_pulls_back_later(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    config = TrainerConfig(learning_rate=1e-2, kl_coef=0.1)
    reference = make_policy(tiny_model, mesh).requires_grad_(False)
    engine = PolicyLearner(make_policy(tiny_model, mesh), reference, config, CPU)
    batch = made_batch(sequences, 100, 1.0)
    assert engine.update(batch, 1e-2)["train/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert engine.update(batch, 1e-2)["train/kl_reference"] > 1e-4


@pytest.mark.parametrize("kind", ["frozen", "ema", "reset"])
def test_a_reference_stays_follows_or_is_renewed(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence], kind: str
) -> None:
    config = TrainerConfig.model_validate(
        {"kl_coef": 0.1, "reference": kind, "reference_decay": 0.75, "reference_every": 2, "learning_rate": 1e-2}
    )
    reference = make_policy(tiny_model, mesh).requires_grad_(False)
    engine = PolicyLearner(make_policy(tiny_model, mesh), reference, config, CPU)
    assert (engine.moving_reference is None) == (kind == "frozen")

    def weights(policy: Policy) -> Tensor:
        reshard(policy)
        return torch.cat([p.detach().to_local().flatten().clone() for p in policy.parameters()])  # type: ignore[attr-defined]

    start = weights(reference)
    engine.update(made_batch(sequences, 100, 1.0, version=0), 1e-2)
    first = weights(engine.policy)
    expected = {"frozen": start, "ema": 0.75 * start + 0.25 * first, "reset": start}[kind]
    torch.testing.assert_close(weights(reference), expected)
    engine.update(made_batch(sequences, 100, 1.0, version=1), 1e-2)
    if kind == "reset":
        torch.testing.assert_close(weights(reference), weights(engine.policy))


def by_sequence(engine: PolicyLearner, sequences: list[TrainSequence]) -> list[float]:
    """Sums penalties over each sequence."""
    branches, tokens = made_tokens(sequences)
    penalties = engine.penalties(branches, tokens)
    assert penalties is not None
    return [float(part.sum()) for part in np.split(penalties, tokens.sampled_starts[1:-1])]


def test_kl_in_the_reward_is_the_log_ratio_of_each_answer(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    config = TrainerConfig(kl_coef=0.5, kl_in="reward", tokens_per_microbatch=60)
    engine = PolicyLearner(make_policy(tiny_model, mesh), make_policy(tiny_model, mesh), config, CPU)
    assert by_sequence(engine, sequences) == pytest.approx([0.0] * len(sequences), abs=1e-4), "its own answers"
    shifted = [
        TrainSequence(s.token_ids, s.loss_mask, [p + 0.1 * m for p, m in zip(s.logprobs, s.loss_mask, strict=True)], ())
        for s in sequences
    ]
    assert by_sequence(engine, shifted) == pytest.approx([0.5 * 0.1 * sum(s.loss_mask) for s in sequences], abs=1e-4)


def test_layers_that_are_computed_again_give_the_same_gradients(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    loss, gradient = gradients(tiny_model, mesh, sequences, 150)
    engine = PolicyLearner(make_policy(tiny_model, mesh, gradient_checkpointing=True), None, TrainerConfig(), CPU)
    passes: list[bool] = []
    calls: list[bool] = []
    engine.policy.register_forward_pre_hook(lambda *_: passes.append(True))
    layers = decoder_layers(engine.policy.model)
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(True))
    again, checkpointed = captured(engine, sequences)
    assert len(calls) == 2 * len(layers) * len(passes) > 0, "nothing was computed again"
    assert again == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(checkpointed, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("backend", "gradient_checkpointing"),
    [
        ("eager", True),  # traced, not translated: that takes half a minute
        pytest.param(
            "inductor", False,
            marks=[pytest.mark.long, pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++ on a CPU")],
        ),
    ],
)  # fmt: skip
def test_compiled_layers_give_the_same_gradients(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence], backend: str, gradient_checkpointing: bool
) -> None:
    config = TrainerConfig(compile=True)
    plain = make_policy(tiny_model, mesh, config=config)
    special = make_policy(tiny_model, mesh, gradient_checkpointing=gradient_checkpointing, config=config)
    compile_layers(special.model, backend)
    graphs = counters["stats"]["unique_graphs"]
    found = []
    for policy in (plain, special):
        kept = [0]
        with torch.autograd.graph.saved_tensors_hooks(partial(keep, kept), lambda tensor: tensor):
            found.append((*captured(PolicyLearner(policy, None, TrainerConfig(), CPU), sequences), kept[0]))
    assert counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
    (loss, gradient, held), (compiled_loss, compiled, compiled_held) = found
    assert compiled_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(compiled, gradient, atol=1e-5, rtol=1e-4)
    assert not gradient_checkpointing or compiled_held < 0.6 * held, "layers that are compiled keep all they compute"


def test_one_rank_computes_in_bfloat16_as_fsdp_does(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    """Both use bfloat16 copies of the parameters, so results are equal; both give float32 gradients."""
    model = load_model(tiny_model)
    choose_attention(model, TrainerConfig(), CPU)
    sharded = Policy(copy.deepcopy(model), TEMPERATURE, 16)
    alone = Policy(model, TEMPERATURE, 16)
    shard(sharded, mesh, torch.bfloat16)
    compute_in(alone, torch.bfloat16)
    config = TrainerConfig(tokens_per_microbatch=200)
    found = [captured(PolicyLearner(policy, None, config, CPU), sequences) for policy in (sharded, alone)]
    (loss, gradient), (own_loss, own) = found
    assert own_loss == pytest.approx(loss, abs=1e-6)
    assert own.dtype == torch.float32 and own.abs().max() > 0.01
    torch.testing.assert_close(own, gradient, atol=1e-4, rtol=1e-2)
    names = [name for name, _ in alone.named_parameters()]
    assert names == [name for name, _ in sharded.named_parameters()], "checkpoints of both go together"


def keep(count: list[int], tensor: Tensor) -> Tensor:
    """Counts elements that are kept for the backward pass."""
    count[0] += tensor.numel()
    return tensor


def test_minibatches_take_whole_groups_and_each_sequence_once() -> None:
    groups = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    sequences = [
        TrainSequence([1] * (5 + group), [0, 1] + [0] * (3 + group), [0] * (5 + group), group=group) for group in groups
    ]
    branches, tokens = made_tokens(sequences)
    parts = share_out(branches, tokens, 2)
    assert sorted(index for part in parts for index in part) == list(range(10))
    assert all(len({n for n, part in enumerate(parts) if any(groups[i] == g for i in part)}) == 1 for g in range(4))
    sizes = [sum(len(sequences[i].token_ids) for i in part) for part in parts]
    assert max(sizes) - min(sizes) <= 32
    assert share_out(branches[:1], tokens, 4) == [[0]] and share_out([], tokens, 3) == [[]]


def test_an_entropy_bonus_alone_raises_the_entropy(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    engine = PolicyLearner(make_policy(tiny_model, mesh), None, TrainerConfig(entropy_coef=0.1), CPU)
    level = [TrainSequence(s.token_ids, s.loss_mask, s.logprobs, ()) for s in sequences]
    entropies = [engine.update(made_batch(level, 100, 0.0), 1e-3)["train/entropy"] for _ in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]
