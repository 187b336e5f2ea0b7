"""Tests what a step says of its tokens: before its first update, of all of them, and the same on any ranks."""

from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.train.measured_steps import (
    VERSION,
    make_batch,
    make_learner,
    make_sequences,
    parameters,
    plain,
    step,
    steps_of_two_ranks,
)
from tests.train.test_mismatch import age_of, reference

UPDATES: list[dict[str, Any]] = [
    {"minibatches": 4},
    {"minibatches": 4, "proximal": "recomputed"},
    {"minibatches": 3, "ratio": "sequence"},
]
EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize("choices", UPDATES)
def test_mismatch_does_not_hold_the_updates_of_its_own_step(
    tiny_model: Path, mesh: DeviceMesh, choices: dict[str, Any]
) -> None:
    found, _ = step(tiny_model, mesh, choices, spread=0.0, ages=(0,), idle=())
    assert found["mismatch/ratio_max"] == found["mismatch/ratio_max/age_0"] < 1e-4, (
        "on-policy: server and trainer agree"
    )
    assert found["mismatch/kl"] < 1e-8 and found["mismatch/ess_sequence"] == pytest.approx(1.0)
    assert found["train/update_ratio_max"] > 0.05, "the updates themselves changed nothing"
    assert 0 < found["train/update_ratio_mean"] < found["train/update_ratio_max"]
    assert found["train/tokens_share"] == 1.0
    assert (found["train/measured_share"] == 1.0) == (choices.get("proximal") == "recomputed")


def test_a_step_of_one_update_has_its_mismatch_in_the_loss(tiny_model: Path, mesh: DeviceMesh) -> None:
    found, _ = step(tiny_model, mesh, {}, idle=())
    assert found["mismatch/ratio_max"] == pytest.approx(found["train/update_ratio_max"], rel=1e-5)
    assert found["train/measured_share"] == found["train/tokens_share"] == 1.0


def expected_of(folder: Path) -> dict[str, float]:
    """Computes entropy and mismatch of all tokens with a plain float64 model."""
    sequences = make_sequences(folder, 0.3)
    records = [
        {
            "logprobs": logprob, "entropies": entropy, "behavior": behavior, "weights": 1.0, "sequences": number,
            "versions": s.versions[0], "token_ids": s.token_ids[at],
        }
        for number, (s, values) in enumerate(zip(sequences, plain(folder, sequences), strict=True))
        for at, (behavior, (logprob, entropy)) in enumerate(
            zip(s.logprobs[5:], values, strict=True), start=5
        )
    ]  # fmt: skip
    for r in records:
        r["versions"] += 7 - VERSION  # the version of `age_of`
    found = {f"mismatch/{name}": value for name, value in reference(records).items()}
    for age, name in enumerate(("age_0", "age_1", "age_2+")):
        own = [r for r in records if age_of(r) == age]
        found |= {f"mismatch/{key}/{name}": value for key, value in reference(own).items()}
    return found | {"train/entropy": fmean(r["entropies"] for r in records)}


@pytest.mark.parametrize("budget", [1, 1000])
@pytest.mark.parametrize("choices", [{}, {"minibatches": 3}, {"proximal": "recomputed"}])
def test_entropy_and_mismatch_are_of_all_tokens_where_all_are_measured(
    tiny_model: Path, mesh: DeviceMesh, choices: dict[str, Any], budget: int
) -> None:
    choices = {"metric_share": 1.0, "tokens_per_microbatch": budget, "clip_eps_high": 0.28, **choices}
    idle = () if "minibatches" in choices else (0,)
    expected = expected_of(tiny_model)
    found, _ = step(tiny_model, mesh, choices, idle=idle)
    assert (found["train/measured_share"], found["train/tokens_share"] < 1) == (1.0, bool(idle))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=2e-6)


def test_a_sample_of_tokens_without_advantage_stands_for_all(tiny_model: Path, mesh: DeviceMesh) -> None:
    """Over many steps, and in steps without any signal, the entropy is that of all tokens."""
    expected = expected_of(tiny_model)["train/entropy"]
    engine = make_learner(tiny_model, mesh, {"metric_share": 0.2})
    sequences = make_sequences(tiny_model, 0.3)
    found = [engine.update(make_batch(sequences, EVERY, version), 1e-2) for version in range(4, 237)]
    assert all(0 < one["train/measured_share"] < 0.5 for one in found)
    assert fmean(one["train/entropy"] for one in found) == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_tokens_with_and_without_advantage_count_by_their_numbers(
    tiny_model: Path, mesh: DeviceMesh, minibatches: int
) -> None:
    """All tokens without advantage have one behavior logprob, so that any sample of them gives the exact mean."""
    idle = (0, 1)
    sequences = [
        replace(s, logprobs=[-9.0 if s.group in idle else -1.0] * len(s.token_ids))
        for s in make_sequences(tiny_model, 0.3)
    ]
    engine = make_learner(tiny_model, mesh, {"metric_share": 0.3, "minibatches": minibatches})
    found = engine.update(make_batch(sequences, idle), 1e-2)
    logprobs = [-9.0 if s.group in idle else -1.0 for s in sequences for _ in range(sum(s.loss_mask))]
    assert found["train/measured_share"] < 1
    if minibatches == 1:
        assert found["train/tokens_share"] < found["train/measured_share"]
        assert found["mismatch/perplexity_behavior"] == pytest.approx(exp(-fmean(logprobs)), rel=1e-5)
    else:  # the sample is of the later updates' tokens too
        steps = [engine.update(make_batch(sequences, idle, version), 0.0) for version in range(4, 59)]
        mean = fmean(log(one["mismatch/perplexity_behavior"]) for one in steps)
        assert mean == pytest.approx(-fmean(logprobs), rel=2e-2)


def test_without_signal_the_update_is_skipped_and_nothing_is_zero_that_was_not_measured(
    tiny_model: Path, mesh: DeviceMesh
) -> None:
    sequences = make_sequences(tiny_model, 0.3)
    for share in (0.125, 0.0):
        engine = make_learner(tiny_model, mesh, {"metric_share": share})
        before = parameters(engine)
        found = engine.update(make_batch(sequences, EVERY), 1e-2)
        assert torch.equal(parameters(engine), before)
        assert (found["train/skipped"], found["train/tokens"], found["train/tokens_share"]) == (1.0, 0.0, 0.0)
        assert not {"train/clip_fraction", "train/grad_norm", "train/update_ratio_max"} & found.keys()
        measured = [name for name in found if name.startswith(("mismatch/", "train/entropy", "train/measured"))]
        assert (found.get("train/entropy", 0.0) > 1.0) == bool(measured) == (share > 0)


SHARES = (0.0, 0.5)
CASES: list[dict[str, Any]] = [
    {"choices": {"metric_share": share, "tokens_per_microbatch": budget, **more}, "idle": idle}
    for share in SHARES
    for budget, more, idle in (
        (1000, {}, (0, 2)),
        (30, {}, (0, 2)),
        (30, {"minibatches": 2}, (0,)),
        (30, {"proximal": "recomputed", "correction": "truncate", "correction_cap": 1.1}, (1,)),
        (30, {}, EVERY),
    )
]


def test_a_sample_changes_no_parameter_and_metrics_are_the_same_on_two_ranks(
    tiny_model: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    first, second = steps_of_two_ranks(tiny_model, tmp_path, CASES)
    alone = [step(tiny_model, mesh, **case) for case in CASES]
    half = len(CASES) // 2
    for found in (first, second, alone):
        for (less, without), (more, with_sample) in zip(found[:half], found[half:], strict=True):
            assert more["train/measured_share"] > less.get("train/measured_share", 0.0), "nothing was drawn"
            assert torch.equal(without, with_sample), "the sample changed the update"
    for case, one, other, (metrics, weights) in zip(CASES, first, second, alone, strict=True):
        assert one[0] == other[0], "ranks disagree"
        keys = {name for name in metrics if not name.startswith(("train/microbatches", "train/rows_tokens"))}
        assert keys <= one[0].keys()
        own = {name: metrics[name] for name in keys}
        assert {name: one[0][name] for name in keys} == pytest.approx(own, rel=1e-3, abs=2e-6), case
        torch.testing.assert_close(one[1], weights, atol=1e-4, rtol=1e-3)


def test_the_sample_is_of_the_batch_alone(tiny_model: Path, mesh: DeviceMesh) -> None:
    """The same batch gives the same numbers, whatever its branches weigh in the loss."""
    sequences = make_sequences(tiny_model, 0.3)
    found = []
    for weight in (1.0, 0.25):
        engine = make_learner(tiny_model, mesh, {})
        batch = make_batch([replace(s, weight=weight) for s in sequences], (0, 2))
        found.append(engine.update(batch, 1e-2))
    names = [name for name in found[0] if name.startswith(("mismatch/", "train/entropy"))]
    assert names and [found[0][n] for n in names] == [found[1][n] for n in names]
