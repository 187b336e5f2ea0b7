"""Tests whole trainer steps with masked tokens and rejected sequences: the normalizer, the gradient, the metrics."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from agentrl.bench.made_batch import TrainSequence, made_batch
from agentrl.config.recipe import TrainerConfig
from agentrl.train.learner import PolicyLearner
from tests.train.test_policy import CPU, gradients, make_policy, plain_logprobs
from tests.train.test_rows import random_sequences


@pytest.fixture
def sequences(tiny_model: Path, mesh: DeviceMesh) -> list[TrainSequence]:
    """Makes sequences whose behavior logprobs lie by 0.01 nats off the model's, and by 0.4 in every second one."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    rng, found = random.Random(0), []
    for index, s in enumerate(random_sequences(5, 6)):
        values = iter([v.item() for v in plain_logprobs(model, s)])
        gap = 0.4 if index % 2 else 0.01
        logprobs = [next(values) - gap if mask else 0.0 for mask in s.loss_mask]
        found.append(TrainSequence(s.token_ids, s.loss_mask, logprobs, [rng.gauss(0, 1)] * len(logprobs), 0.7))
    return found


def metrics_of(
    folder: Path, mesh: DeviceMesh, sequences: list[TrainSequence], choices: dict[str, Any]
) -> dict[str, float]:
    config = TrainerConfig.model_validate(choices)
    engine = PolicyLearner(make_policy(folder, mesh), None, config, CPU)
    return engine.update(made_batch(sequences, float(sum(sum(s.loss_mask) for s in sequences))), 1e-3)


def tokens_in(sequences: list[TrainSequence]) -> int:
    return sum(sum(s.loss_mask) for s in sequences)


@pytest.mark.parametrize(
    "choices",
    [
        {"reject_by": "geometric", "reject_high": 1.2},
        {"reject_by": "k1", "reject_low": -0.2},
        {"reject_by": "k2", "reject_high": 0.01},
        {"reject_by": "k3", "reject_high": 0.01, "proximal": "recomputed"},
        {"token_mask_high": 1.2},
    ],
)
def test_left_out_tokens_count_in_the_normalizer_and_nowhere_else(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence], choices: dict[str, Any]
) -> None:
    """The step is that of the same batch in which the far sequences weigh nothing."""
    far = [replace(s, weight=0.0) if index % 2 else s for index, s in enumerate(sequences)]
    plain = {key: value for key, value in choices.items() if key == "proximal"} | {"clip_eps": 0.2}
    loss, gradient = gradients(tiny_model, mesh, sequences, 60, choices | plain)
    expected, other = gradients(tiny_model, mesh, far, 60, plain)
    assert loss == pytest.approx(expected, abs=1e-6) and gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-4)


def test_metrics_tell_the_share_left_out_by_each_key_and_are_absent_without_it(
    tiny_model: Path, mesh: DeviceMesh, sequences: list[TrainSequence]
) -> None:
    share = tokens_in(sequences[1::2]) / tokens_in(sequences)
    found = metrics_of(tiny_model, mesh, sequences, {"token_mask_high": 1.2})
    assert found["train/masked_ratio"] == pytest.approx(share)
    assert metrics_of(tiny_model, mesh, sequences, {"reject_by": "k2", "reject_high": 0.01})[
        "train/rejected"
    ] == pytest.approx(share)
    names = {"train/masked_ratio", "train/rejected", "train/masked", "train/masked_cov", "train/penalized_cov"}
    assert not names & metrics_of(tiny_model, mesh, sequences, {}).keys()
    assert names & found.keys() == {"train/masked_ratio"}
    whole = tokens_in(sequences)
    chosen = metrics_of(tiny_model, mesh, sequences, {"kl_cov": 0.2})["train/penalized_cov"]
    assert chosen == pytest.approx(int(0.2 * whole) / whole)
