"""Tests masks of tokens and rejection of sequences against float64 references, one loop over tokens or sequences."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load
from agentrl.train.corrections import correction_weights, masked_tokens, rejected_tokens, sequence_mismatch
from agentrl.train.loss import LossTokens, binary_divergence, clip, dppo, kl_divergence, token_losses
from tests.train.test_loss import tokens_of

LENGTHS = (1, 7, 3, 12, 5)
MEASURES = ("geometric", "k1", "k2", "k3")


def made_tokens(config: TrainerConfig, seed: int = 0, spread: float = 0.5) -> LossTokens:
    """Makes float64 tokens of five sequences that lie mixed, with three policies apart by about ``spread`` nats."""
    rng = random.Random(seed)
    sequences = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    rng.shuffle(sequences)
    drift = [rng.gauss(0, spread) for _ in LENGTHS]  # so that sequences differ as wholes
    behavior = [-rng.expovariate(0.7) - 0.05 for _ in sequences]

    def moved() -> list[float]:
        return [min(b + drift[s] + rng.gauss(0, spread), -1e-3) for b, s in zip(behavior, sequences, strict=True)]

    proximal, logprobs, reference = moved(), moved(), moved()

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return tokens_of(
        config, tensor(logprobs).requires_grad_(), tensor(proximal if config.proximal == "recomputed" else behavior),
        tensor([rng.gauss(0, 1) for _ in sequences]), behavior=tensor(behavior), sequences=torch.tensor(sequences),
        reference=tensor(reference), entropies=tensor([rng.random() for _ in sequences]),
    )  # fmt: skip


def mismatch_by_hand(tokens: LossTokens) -> list[float]:
    recomputed = tokens.config.proximal == "recomputed"
    trainer = tokens.proximal.tolist() if recomputed else tokens.logprobs.tolist()
    return [math.exp(a - b) for a, b in zip(trainer, tokens.behavior.tolist(), strict=True)]


def measured_by_hand(ratios: list[float], measure: str) -> float:
    if measure == "geometric":
        return math.prod(ratios) ** (1 / len(ratios))
    terms = {
        "k1": [-math.log(r) for r in ratios],
        "k2": [math.log(r) ** 2 / 2 for r in ratios],
        "k3": [r - 1 - math.log(r) for r in ratios],
    }[measure]
    return sum(terms) / len(terms)


def outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


def losses_by_hand(tokens: LossTokens) -> list[float]:
    """Returns the loss of each token of the clip objective, from the definitions."""
    config, ratios = tokens.config, mismatch_by_hand(tokens)
    columns = [
        column.tolist()
        for column in (tokens.logprobs, tokens.proximal, tokens.behavior, tokens.reference, tokens.advantages,
                       tokens.entropies, tokens.sequences)
    ]  # fmt: skip
    found = []
    for index, (new, old, sampled, ref, advantage, entropy, sequence) in enumerate(zip(*columns, strict=True)):
        ratio = math.exp(new - old)
        loss = max(-ratio * advantage, -min(max(ratio, 0.8), 1.2) * advantage)
        if config.correction == "weight":
            loss *= math.exp(old - sampled)
        if outside(ratios[index], config.token_mask_low, config.token_mask_high):
            loss = 0.0
        if config.kl_coef:
            loss += config.kl_coef * (math.exp(ref - new) - 1 - (ref - new))
        loss -= config.entropy_coef * entropy
        own = [r for r, s in zip(ratios, columns[-1], strict=True) if s == sequence]
        if config.reject_by and outside(measured_by_hand(own, config.reject_by), config.reject_low, config.reject_high):
            loss = 0.0
        found.append(loss)
    return found


CASES: dict[str, dict[str, Any]] = {
    "icepop": {"preset": "icepop", "token_mask_high": 1.5},
    "a lower bound alone": {"token_mask_low": 0.8},
    "an upper bound alone": {"token_mask_high": 1.2, "proximal": "recomputed"},
    "geometric": {"reject_by": "geometric", "reject_low": 0.8, "reject_high": 1.25},
    "geometric from below": {"reject_by": "geometric", "reject_low": 0.9, "proximal": "recomputed"},
    "k1": {"reject_by": "k1", "reject_low": -0.2, "reject_high": 0.2},
    "k2": {"reject_by": "k2", "reject_high": 0.2, "proximal": "recomputed"},
    "k3": {"reject_by": "k3", "reject_high": 0.2},
    "both": {"preset": "icepop", "reject_by": "k3", "reject_high": 0.3},
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_definition_in_float64(name: str, seed: int) -> None:
    given = {"kl_coef": 0.3, "entropy_coef": 0.1, "clip_eps": 0.2, **CASES[name]}
    config = TrainerConfig.model_validate(given)
    tokens = made_tokens(config, seed)
    losses = token_losses(tokens, clip)
    assert losses.total.tolist() == pytest.approx(losses_by_hand(tokens), abs=1e-12)
    if losses.rejected is not None:
        losses.total.sum().backward()
        assert tokens.logprobs.grad is not None
        assert not tokens.logprobs.grad[losses.rejected].any(), "a rejected sequence has no gradient either"


def test_the_cases_mask_and_reject_some_and_not_all() -> None:
    for name, choices in CASES.items():
        config = TrainerConfig.model_validate(choices)
        for found in (masked_tokens, rejected_tokens):
            masks = [found(made_tokens(config, seed)) for seed in range(4)]
            given = torch.cat([mask for mask in masks if mask is not None] or [torch.tensor([True, False])])
            assert given.any() and not given.all(), (name, found)


@settings(deadline=None)
@given(seed=st.integers(0, 500), measure=st.sampled_from(MEASURES), recomputed=st.booleans())
def test_bounds_that_do_not_act_change_no_bit(seed: int, measure: str, recomputed: bool) -> None:
    plain: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.1}
    if recomputed:
        plain |= {"proximal": "recomputed", "correction": "truncate"}
    wide = plain | {"token_mask_low": 1e-30, "token_mask_high": 1e30, "reject_by": measure, "reject_high": 1e30}
    without, bounded = (token_losses(made_tokens(TrainerConfig.model_validate(c), seed), clip) for c in (plain, wide))
    assert torch.equal(without.total, bounded.total)
    assert without.masked is None and without.rejected is None, "no key, no mask"


@settings(deadline=None)
@given(seed=st.integers(0, 500), measure=st.sampled_from(MEASURES), recomputed=st.booleans())
def test_equal_policies_are_never_masked_or_rejected(seed: int, measure: str, recomputed: bool) -> None:
    equal = 1.0 if measure == "geometric" else 0.0
    config = TrainerConfig.model_validate(
        {
            "token_mask_low": 1.0, "token_mask_high": 1.0, "reject_by": measure, "reject_high": equal,
            "reject_low": equal if measure in ("geometric", "k1") else None,
            "proximal": "recomputed" if recomputed else "behavior",
        }
    )  # fmt: skip
    tokens = made_tokens(config, seed)
    same = tokens_of(config, tokens.behavior, tokens.behavior, tokens.advantages, sequences=tokens.sequences)
    masked, rejected = masked_tokens(same), rejected_tokens(same)
    assert masked is not None and rejected is not None and not masked.any() and not rejected.any()


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_geometric_mean_and_k2_are_symmetric_in_log_space(log_ratios: list[float]) -> None:
    values, one = torch.tensor(log_ratios, dtype=torch.float64), torch.zeros(len(log_ratios), dtype=torch.long)
    there, back = (sequence_mismatch(sign * values, one, "geometric") for sign in (1, -1))
    torch.testing.assert_close(there * back, torch.ones_like(values))
    assert torch.equal(sequence_mismatch(values, one, "k2"), sequence_mismatch(-values, one, "k2"))
    torch.testing.assert_close(sequence_mismatch(values, one, "k1").neg().exp(), there)


def test_a_mean_does_not_reject_a_sequence_for_its_length_as_a_product_does() -> None:
    long = torch.full((2000,), 0.01, dtype=torch.float64)
    config = TrainerConfig(
        proximal="recomputed", correction="mask", correction_level="sequence", correction_cap=2.0,
        reject_by="geometric", reject_low=0.95, reject_high=1.05,
    )  # fmt: skip
    tokens = tokens_of(config, long - 1, long - 1, torch.ones(2000), behavior=torch.full_like(long, -1.0))
    rejected = rejected_tokens(tokens)
    assert rejected is not None and not rejected.any()
    assert not correction_weights(tokens).any(), "exp(20) is above the cap: nothing is left"


def divergence_by_hand(new: float, old: float, kind: str) -> float:
    if kind == "tv":
        return abs(new - old)
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kind", "bound"), [("tv", 0.15), ("kl", 0.05), ("tv", 0.02)])
def test_dppo_is_that_of_the_definition_in_float64(kind: str, bound: float, seed: int) -> None:
    default = bound != 0.02
    config = TrainerConfig.model_validate(
        {"preset": "dppo", "dppo_divergence": kind, "dppo_threshold": None if default else bound}
    )
    tokens = made_tokens(config, seed, spread=0.3)
    loss, left = dppo(tokens)
    loss.sum().backward()
    expected, masked = [], []
    for logprob, before, advantage in zip(
        tokens.logprobs.tolist(), tokens.behavior.tolist(), tokens.advantages.tolist(), strict=True
    ):
        new, old = math.exp(logprob), math.exp(before)
        further = (new - old) * advantage > 0
        masked.append(further and divergence_by_hand(new, old, kind) > bound)
        expected.append(0.0 if masked[-1] else -new / old * advantage)
    assert left.tolist() == masked and any(masked) and not all(masked)
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert tokens.logprobs.grad is not None and torch.equal(tokens.logprobs.grad == 0, left)


@settings(deadline=None)
@given(st.floats(-8, -1e-6), st.floats(-8, -1e-6), st.sampled_from(["tv", "kl"]))
def test_the_binary_divergence_is_0_for_equal_policies_and_total_variation_symmetric(
    one: float, other: float, kind: str
) -> None:
    first, second = (torch.tensor([value], dtype=torch.float64) for value in (one, other))
    assert binary_divergence(first, first, kind).item() == 0
    found = binary_divergence(first, second, kind).item()
    assert found == pytest.approx(divergence_by_hand(math.exp(one), math.exp(other), kind), abs=1e-7)
    assert found >= -1e-12
    if kind == "tv":
        assert found == binary_divergence(second, first, kind).item()


def test_a_certain_token_has_a_finite_divergence() -> None:
    certain = torch.tensor([0.0, 0.0, -1.0])
    before = torch.tensor([0.0, -1.0, 0.0])
    assert binary_divergence(certain, before, "kl").isfinite().all()


@pytest.mark.parametrize(("estimator", "other"), [("k3", "forward"), ("k2", "reverse")])
def test_the_plain_gradient_is_of_the_kl_that_the_formula_names(estimator: str, other: str) -> None:
    """Uses the exact distribution: k3's own gradient is that of KL(reference || pi), k2's that of the reverse."""
    reference = torch.tensor([0.2, -0.3, 1.0, 0.0], dtype=torch.float64).log_softmax(-1)
    logits = torch.tensor([0.5, 0.1, -0.7, 0.3], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    forward = (reference.exp() * (reference - logprobs)).sum()
    reverse = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad({"forward": forward, "reverse": reverse}[other], logits, retain_graph=True)
    estimate = (logprobs.detach().exp() * kl_divergence(logprobs, reference, estimator, "plain")).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"objective": "policy_gradient", "token_mask_low": 0.5, "token_mask_high": 2.0},
        {"objective": "policy_gradient", "reject_by": "geometric", "reject_high": 2.0},
        {"objective": "dppo"},
        {"objective": "cispo"},
    ],
)
def test_a_ratio_beyond_float32_that_a_bound_leaves_out_gives_no_gradient(choices: dict[str, Any]) -> None:
    logprobs = torch.tensor([-0.1, -1.0], requires_grad=True)
    behavior = torch.tensor([-120.0, -1.0])
    config = TrainerConfig(**choices)
    tokens = tokens_of(config, logprobs, behavior, torch.tensor([1.0, 1.0]), sequences=torch.tensor([0, 1]))
    token_losses(tokens, load("objective", config.objective)).total.sum().backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    if config.objective != "cispo":  # whose bounded ratio is a weight
        assert logprobs.grad[0] == 0.0
    assert logprobs.grad[1] != 0.0
