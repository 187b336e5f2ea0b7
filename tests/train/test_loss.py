"""Tests every objective, weight and estimator against published values (the project's reference figures)."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch_selection import second_moment_mask
from agentrl.train.corrections import correction_weights
from agentrl.train.loss import (
    LossTokens,
    Objective,
    cispo,
    clip,
    dual_clip,
    kl_divergence,
    log_linear_proximal,
    policy_gradient,
    sapo,
    token_losses,
)
from agentrl.train.sequences import sequence_means

LOGP = torch.tensor([[-1, -0.5, -2], [-0.7, -1.2, -0.3]])
PROX = torch.tensor([[-1.2, -0.6, -1.5], [-0.7, -1, -0.9]])
BEHAVE = torch.tensor([[-1.1, -0.9, -1.4], [-0.5, -1.3, -1]])
ADVANTAGES = torch.tensor([[1.0, 1, -1], [-0.5, 2, 2]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
SEQUENCES = torch.tensor([[0, 0, 0], [1, 1, 1]])[MASK]
LENGTHS = torch.tensor([[3.0] * 3, [2.0] * 3])[MASK]


def tokens_of(
    config: TrainerConfig,
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    sequences: Tensor | None = None,
    behavior: Tensor | None = None,
    version: int = 0,
    **more: Tensor,
) -> LossTokens:
    """Makes loss tokens; values that a test does not set are neutral."""
    plain = torch.zeros(len(logprobs), dtype=torch.long)
    given = {
        "entropies": torch.zeros_like(logprobs), "reference": None, "teacher": None, "versions": plain,
        "mask": plain == 0, "turns": plain,
    }  # fmt: skip
    return LossTokens(
        logprobs=logprobs, behavior=proximal if behavior is None else behavior, proximal=proximal,
        advantages=advantages, sequences=plain if sequences is None else sequences, version=version, config=config,
        **(given | more),  # type: ignore[arg-type]
    )  # fmt: skip


def per_token(
    objective: Objective, config: TrainerConfig, logp: Tensor = LOGP, advantages: Tensor = ADVANTAGES
) -> Tensor:
    """Returns the losses of the trained tokens."""
    tokens = tokens_of(config, logp[MASK], PROX[MASK], advantages[MASK], sequences=SEQUENCES, behavior=BEHAVE[MASK])
    return token_losses(tokens, objective).total


@pytest.mark.parametrize(
    ("objective", "choices", "expected"),
    [
        (clip, {}, -0.528526),
        (clip, {"clip_eps_high": 0.28}, -0.532807),
        (clip, {"ratio": "sequence"}, -0.458553),
        (sapo, {}, -1.098970),
    ],
)
def test_the_mean_over_tokens_is_the_published_one(objective: Objective, choices: dict, expected: float) -> None:
    config = TrainerConfig.model_validate({"clip_eps": 0.2, **choices})
    assert per_token(objective, config).mean().item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("objective", "choices", "expected"), [(clip, {"ratio": "sequence"}, -0.495232), (sapo, {}, -1.139648)]
)
def test_the_mean_over_sequences_is_the_published_one(objective: Objective, choices: dict, expected: float) -> None:
    losses = per_token(objective, TrainerConfig.model_validate({"clip_eps": 0.2, **choices}))
    assert (losses / LENGTHS).sum().item() / 2 == pytest.approx(expected, abs=1e-5)


def test_dual_clip_bounds_what_a_negative_advantage_can_do() -> None:
    config = TrainerConfig(dual_clip=3.0)
    losses = per_token(dual_clip, config, LOGP + 2, -ADVANTAGES.abs())
    assert losses.mean().item() == pytest.approx(3.3, abs=1e-5)
    assert torch.equal(
        per_token(dual_clip, config, LOGP, ADVANTAGES.abs()), per_token(clip, config, LOGP, ADVANTAGES.abs())
    )


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [("truncate", 5.0, -0.730947), ("weight", 1.0, -0.730947), ("truncate", 1.2, -0.648746), ("mask", 1.2, 0.009486)],
)
def test_decoupled_loss_is_the_published_one(correction: str, cap: float, expected: float) -> None:
    config = TrainerConfig.model_validate(
        {"proximal": "recomputed", "correction": correction, "correction_cap": cap, "clip_eps": 0.2}
    )
    assert per_token(clip, config).mean().item() == pytest.approx(expected, abs=1e-5)


def test_a_weight_of_the_sequence_is_the_product_over_its_tokens() -> None:
    config = TrainerConfig(proximal="recomputed", correction="weight", correction_level="sequence")
    given = tokens_of(config, LOGP[MASK], PROX[MASK], ADVANTAGES[MASK], sequences=SEQUENCES, behavior=BEHAVE[MASK])
    weights = correction_weights(given)
    by_hand = [math.exp(-1.2 - 0.6 - 1.5 + 1.1 + 0.9 + 1.4), math.exp(-0.7 - 1 + 0.5 + 1.3)]
    assert weights.tolist() == pytest.approx([by_hand[0]] * 3 + [by_hand[1]] * 2, abs=1e-6)


def flat(config: TrainerConfig, logp: Tensor, proximal: Tensor, advantages: Tensor = ADVANTAGES) -> LossTokens:
    return tokens_of(config, logp.flatten(), proximal.flatten(), advantages.flatten())


def test_cispo_keeps_the_gradient_of_every_token_and_bounds_its_weight() -> None:
    logp = LOGP.clone().requires_grad_()
    loss, bounded = cispo(flat(TrainerConfig(objective="cispo", clip_eps_high=0.5), logp, PROX))
    loss.sum().backward()
    ratio = torch.exp(LOGP - PROX)
    torch.testing.assert_close(logp.grad, -ADVANTAGES * ratio.clamp(max=1.5))
    assert torch.equal(bounded, (ratio > 1.5).flatten()) and bounded.any()


@pytest.mark.parametrize("objective", [clip, dual_clip, cispo, sapo, policy_gradient])
def test_at_ratio_one_every_surrogate_is_the_policy_gradient(objective: Objective) -> None:
    logp = LOGP.clone().requires_grad_()
    loss, bounded = objective(flat(TrainerConfig(), logp, LOGP))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -ADVANTAGES)
    assert not bounded.any()
    nothing, _ = objective(flat(TrainerConfig(), LOGP, PROX, torch.zeros_like(LOGP)))
    assert not nothing.any(), "it says that a token without advantage has no loss"


def test_the_gradient_is_zero_exactly_where_the_clip_says_so() -> None:
    logp = LOGP.clone().requires_grad_()
    loss, clipped = clip(flat(TrainerConfig(), logp, PROX))
    loss.sum().backward()
    assert logp.grad is not None and clipped.any()
    assert torch.equal((logp.grad == 0).flatten(), clipped)


def test_a_sequence_ratio_moves_every_token_of_the_sequence() -> None:
    logp = LOGP[MASK].clone().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0])
    config = TrainerConfig(ratio="sequence", objective="policy_gradient")
    loss, _ = policy_gradient(tokens_of(config, logp, PROX[MASK], advantages, sequences=SEQUENCES))
    (loss / LENGTHS).sum().backward()
    ratio = torch.exp(sequence_means(logp - PROX[MASK], SEQUENCES)).detach()
    torch.testing.assert_close(logp.grad, -advantages * ratio / LENGTHS)


def test_the_log_linear_guess_is_the_published_one() -> None:
    logprobs, behavior = torch.full((4,), -0.5), torch.full((4,), -1.0)
    guess = log_linear_proximal(logprobs, behavior, torch.tensor([5, 2, 4, 5]), 5)
    assert guess.tolist() == pytest.approx([-1, -0.625, -0.75, -1], abs=1e-6)


def test_the_second_moment_mask_drops_the_largest_log_ratios_first() -> None:
    proximal, behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -3.0, -0.7, -1.0])
    assert second_moment_mask(proximal, behavior, 10.0).all()
    assert second_moment_mask(proximal, behavior, 0.04).tolist() == [True, False, True, True]
    assert second_moment_mask(proximal, behavior, 0.01).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -1]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])]
)
@pytest.mark.parametrize("gradient", ["plain", "unbiased"])
def test_kl_estimators_are_the_published_ones(estimator: str, expected: list[float], gradient: str) -> None:
    values = kl_divergence(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), estimator, gradient)
    assert values.tolist() == pytest.approx(expected, abs=1e-5)


def test_k3_of_nearly_equal_policies_is_their_half_square_and_never_negative() -> None:
    away = torch.tensor([3e-5, -1e-4, 1e-3, -7e-4])
    values = kl_divergence(away, torch.zeros(4), "k3", "plain")
    assert values.tolist() == pytest.approx((away.double() ** 2 / 2).tolist(), rel=1e-2)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_unbiased_gradient_is_that_of_the_kl_itself(estimator: str) -> None:
    """Uses the exact distribution instead of samples, so no sampling error has to be tolerated."""
    reference = torch.tensor([0.2, -0.3, 1.0, 0.0]).log_softmax(-1)
    logits = torch.tensor([0.5, 0.1, -0.7, 0.3], requires_grad=True)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    estimate = (logprobs.detach().exp() * kl_divergence(logprobs, reference, estimator, "unbiased")).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(got, exact)


def test_a_token_that_is_masked_has_no_loss_however_far_its_policies_are_apart() -> None:
    config = TrainerConfig(objective="policy_gradient", proximal="recomputed", correction="weight")
    far = torch.tensor([0.0, 200.0])
    mask = torch.tensor([True, False])
    tokens = tokens_of(config, far, torch.zeros(2), torch.ones(2), behavior=-far, mask=mask)
    assert token_losses(tokens, policy_gradient).total.tolist() == [-1.0, 0.0]


def test_an_objective_that_gives_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="want a loss and a bool"):
        token_losses(flat(TrainerConfig(), LOGP, PROX), lambda tokens: (tokens.logprobs.sum(), tokens.mask))


def test_formulas_and_presets_are_shown_without_torch() -> None:
    code = (
        "import sys; from agentrl.config.recipe import TrainerConfig; from agentrl.train.formula import formula; "
        "formula(TrainerConfig(preset='gspo')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
