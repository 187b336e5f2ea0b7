"""Tests the metrics of mismatch against plain Python over lists of numbers."""

import math
import random
from collections import defaultdict
from statistics import fmean
from typing import Any

import pytest
import torch

from agentrl.config.recipe import TrainerConfig
from agentrl.train.mismatch import MeasuredTokens, mismatch_metrics, mismatch_sums

VERSION = 7


def drawn(seed: int, count: int, spread: float = 0.4, ages: tuple[int, ...] = (0, 1, 2, 5)) -> list[dict[str, Any]]:
    """Makes tokens as records; a sequence's tokens have one weight and several versions."""
    rng = random.Random(seed)
    found = []
    for sequence in range(count):
        weight = rng.choice([1.0, 2.5])
        for _ in range(rng.randint(1, 6)):
            behavior = -rng.random() * 3
            found.append(
                {
                    "logprobs": behavior + rng.gauss(0, spread), "behavior": behavior, "entropies": rng.random(),
                    "versions": VERSION - rng.choice(ages), "sequences": sequence, "weights": weight,
                    "token_ids": rng.randint(0, 99), "advantages": 0.0, "turns": 0,
                }
            )  # fmt: skip
    return found


def tensors(records: list[dict[str, Any]]) -> MeasuredTokens:
    whole = ("versions", "sequences", "turns", "token_ids")
    return MeasuredTokens(
        **{
            name: torch.tensor([r[name] for r in records], dtype=torch.long if name in whole else torch.float64)
            for name in MeasuredTokens.__dataclass_fields__
        }
    )


def metrics(records: list[dict[str, Any]], config: TrainerConfig) -> dict[str, float]:
    return mismatch_metrics(*mismatch_sums(tensors(records), config, VERSION), config)


def age_of(record: dict[str, Any]) -> int:
    return min(2, VERSION - record["versions"])


def mean(pairs: list[tuple[float, float]]) -> float:
    """Averages (weight, value) pairs."""
    return math.fsum(w * v for w, v in pairs) / math.fsum(w for w, _ in pairs)


def reference(records: list[dict[str, Any]]) -> dict[str, float]:
    """Computes the metrics of some tokens, one by one."""
    pairs = [(r["weights"], math.exp(r["logprobs"]) / math.exp(r["behavior"])) for r in records]
    by_sequence: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for r in records:
        by_sequence[r["sequences"]].append(r)
    products = [
        (own[0]["weights"], math.prod(math.exp(r["logprobs"]) / math.exp(r["behavior"]) for r in own))
        for own in by_sequence.values()
    ]

    def ess(of: list[tuple[float, float]]) -> float:
        return mean(of) ** 2 / mean([(w, r * r) for w, r in of])

    def chi2(of: list[tuple[float, float]]) -> float:
        return mean([(w, r * r) for w, r in of]) - 2 * mean(of) + 1

    worst = max(records, key=lambda r: abs(math.exp(r["logprobs"] - r["behavior"]) - 1))
    return {
        "tokens": len(records),
        "log_ratio": mean([(w, abs(math.log(r))) for w, r in pairs]),
        "kl": mean([(w, r - 1 - math.log(r)) for w, r in pairs]),
        "kl_k1": mean([(w, -math.log(r)) for w, r in pairs]),
        "chi2": chi2(pairs),
        "chi2_sequence": chi2(products),
        "ess": ess(pairs),
        "ess_sequence": ess(products),
        "perplexity_behavior": math.exp(-mean([(r["weights"], r["behavior"]) for r in records])),
        "perplexity_trainer": math.exp(-mean([(r["weights"], r["logprobs"]) for r in records])),
        "clip_low": mean([(w, float(r < 0.8)) for w, r in pairs]),
        "clip_high": mean([(w, float(r > 1.28)) for w, r in pairs]),
        "ratio_max": abs(math.exp(worst["logprobs"] - worst["behavior"]) - 1),
        "ratio_token": worst["token_ids"],
    }


CLIP_HIGHER = TrainerConfig(clip_eps=0.2, clip_eps_high=0.28)


def test_metrics_are_those_of_plain_python_for_all_tokens_and_by_age() -> None:
    records = drawn(1, 30)
    found = metrics(records, CLIP_HIGHER)
    expected = {f"mismatch/{k}": v for k, v in reference(records).items()}
    for age, name in enumerate(("age_0", "age_1", "age_2+")):
        own = [r for r in records if age_of(r) == age]
        expected |= {f"mismatch/{k}/{name}": v for k, v in reference(own).items()}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask", "weight"])
def test_tokens_that_the_correction_cuts_are_counted(level: str, kind: str) -> None:
    config = TrainerConfig.model_validate(
        {"proximal": "recomputed", "correction": kind, "correction_level": level, "correction_cap": 1.3}
    )
    records = drawn(2, 30)
    found = metrics(records, config)
    sums: dict[int, float] = defaultdict(float)
    for r in records:
        sums[r["sequences"]] += r["logprobs"] - r["behavior"]
    logs = [sums[r["sequences"]] if level == "sequence" else r["logprobs"] - r["behavior"] for r in records]
    high = mean(
        [(r["weights"], float(kind != "weight" and math.exp(v) > 1.3)) for r, v in zip(records, logs, strict=True)]
    )
    assert found["mismatch/correction_high"] == pytest.approx(high) and (high > 0) == (kind != "weight")
    assert found["mismatch/correction_low"] == 0.0, "there is no lower bound"
    assert "mismatch/correction_high" not in metrics(records, TrainerConfig())


def test_the_clip_range_is_that_of_a_sequence_where_the_ratio_is() -> None:
    records = drawn(3, 30)
    config = TrainerConfig.model_validate({"preset": "gspo", "clip_eps": 0.1, "clip_eps_high": 0.15})
    logs: dict[int, list[float]] = defaultdict(list)
    for r in records:
        logs[r["sequences"]].append(r["logprobs"] - r["behavior"])
    ratios = [(r["weights"], math.exp(fmean(logs[r["sequences"]]))) for r in records]
    found = metrics(records, config)
    assert found["mismatch/clip_low"] == pytest.approx(mean([(w, float(v < 0.9)) for w, v in ratios]))
    assert found["mismatch/clip_high"] == pytest.approx(mean([(w, float(v > 1.15)) for w, v in ratios]))


def test_parts_of_whole_sequences_merge_exactly() -> None:
    records = drawn(4, 24)
    parts = [[r for r in records if r["sequences"] % 3 == number] for number in range(3)]
    summed = [mismatch_sums(tensors(part), CLIP_HIGHER, VERSION) for part in parts]
    sums = torch.stack([s for s, _ in summed]).sum(0)
    worst = torch.stack([w for _, w in summed])
    rank = worst[:, :, 0].argmax(0)
    merged = mismatch_metrics(sums, worst[rank, torch.arange(4)], CLIP_HIGHER)
    assert merged == pytest.approx(metrics(records, CLIP_HIGHER), rel=1e-12)


def test_an_age_without_tokens_has_no_metrics() -> None:
    found = metrics(drawn(5, 6, ages=(1,)), CLIP_HIGHER)
    assert found["mismatch/kl/age_1"] == found["mismatch/kl"]
    assert not any(name.endswith(("age_0", "age_2+")) for name in found)
    empty = mismatch_sums(tensors([]), CLIP_HIGHER, VERSION)
    assert mismatch_metrics(*empty, CLIP_HIGHER) == {}


@pytest.mark.parametrize("gap", [-5000.0, 5000.0])
def test_metrics_stay_finite_where_policies_have_nothing_in_common(gap: float) -> None:
    records = drawn(6, 4)
    for r in records:
        r["behavior"], r["logprobs"] = min(-gap, 0.0) - 1, min(gap, 0.0) - 1
    found = metrics(records, CLIP_HIGHER)
    assert all(math.isfinite(value) for value in found.values())
    assert found["mismatch/ess"] == pytest.approx(1.0), "all ratios are equal"
    assert found["mismatch/kl"] > 100


def test_estimates_have_the_expectation_of_their_divergences() -> None:
    """Each token of a small vocabulary stands for as many draws as the behavior policy would make of it."""
    behavior, trainer = [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]
    records = [
        {**drawn(0, 1)[0], "behavior": math.log(q), "logprobs": math.log(p), "weights": 1000 * q, "sequences": number}
        for number, (q, p) in enumerate(zip(behavior, trainer, strict=True))
    ]
    found = metrics(records, CLIP_HIGHER)
    kl = sum(q * math.log(q / p) for q, p in zip(behavior, trainer, strict=True))
    chi2 = sum((p - q) ** 2 / q for q, p in zip(behavior, trainer, strict=True))
    assert found["mismatch/kl"] == pytest.approx(kl) and found["mismatch/kl_k1"] == pytest.approx(kl)
    assert found["mismatch/chi2"] == pytest.approx(chi2)
    assert found["mismatch/ess"] == pytest.approx(1 / (1 + chi2))
