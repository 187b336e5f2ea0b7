"""Tests selections over a whole batch: covariances and the tokens that Clip-Cov and KL-Cov choose."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch_selection import (
    Selection,
    clip_cov_tokens,
    kl_cov_tokens,
    logprob_covariances,
    second_moment_mask,
    select_tokens,
)
from agentrl.train.loss import policy_gradient, token_losses
from tests.train.test_loss import tokens_of


def made_batch(seed: int, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes float32 logprobs, behavior logprobs and advantages."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.5, tokens)
    behavior = logprobs + rng.normal(0, 0.2, tokens)
    return tuple(torch.tensor(v, dtype=torch.float32) for v in (logprobs, behavior, rng.normal(0, 1.5, tokens)))  # type: ignore[return-value]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 60))
def test_covariances_are_the_terms_of_the_batchs_covariance(seed: int, tokens: int) -> None:
    logprobs, _, advantages = made_batch(seed, tokens)
    found = logprob_covariances(logprobs, advantages)
    a, b = logprobs.numpy().astype(np.float64), advantages.numpy().astype(np.float64)
    np.testing.assert_allclose(found.numpy(), (a - a.mean()) * (b - b.mean()), atol=1e-12)
    assert found.mean().item() == pytest.approx(np.cov(a, b, ddof=0)[0, 1] if tokens > 1 else 0.0, abs=1e-10)


@settings(deadline=None)
@given(st.integers(0, 300), st.sampled_from([1e-4, 0.02, 0.3, 1.0]))
def test_clip_cov_draws_its_share_from_the_tokens_between_the_bounds(seed: int, share: float) -> None:
    covariances = logprob_covariances(*made_batch(seed)[::2])
    chosen = clip_cov_tokens(covariances, share, 0.5, 3.0, seed)
    between = (covariances > 0.5) & (covariances < 3.0)
    assert not (chosen & ~between).any()
    assert int(chosen.sum()) == min(max(1, int(share * 200)), int(between.sum()))
    assert torch.equal(chosen, clip_cov_tokens(covariances, share, 0.5, 3.0, seed)), "the same on every rank"
    assert not clip_cov_tokens(covariances, share, 1e6, 2e6, seed).any()


def test_clip_cov_draws_other_tokens_in_another_step() -> None:
    covariances = logprob_covariances(*made_batch(1)[::2])
    draws = {tuple(clip_cov_tokens(covariances, 0.02, 0.5, 3.0, version).tolist()) for version in range(8)}
    assert len(draws) > 4


@settings(deadline=None)
@given(st.integers(0, 300), st.sampled_from([1e-4, 0.02, 0.3, 1.0]))
def test_kl_cov_takes_the_largest_covariances(seed: int, share: float) -> None:
    covariances = logprob_covariances(*made_batch(seed)[::2])
    chosen = kl_cov_tokens(covariances, share).numpy()
    count = max(1, int(share * 200))
    assert set(np.flatnonzero(chosen)) == set(np.argsort(-covariances.numpy(), kind="stable")[:count])


def test_places_without_a_trained_token_enter_no_statistic() -> None:
    logprobs, behavior, advantages = made_batch(3)
    trained = torch.rand(200, generator=torch.Generator().manual_seed(0)) > 0.3
    config = TrainerConfig(kl_cov=0.05, m2_threshold=0.02)
    found = select_tokens(config, logprobs, behavior, advantages, trained, 0)
    elsewhere = torch.full((200,), -77.0)
    other = select_tokens(
        config, *(values.where(trained, elsewhere) for values in (logprobs, behavior, advantages)), trained, 0
    )
    assert found.kept is not None and found.penalized is not None
    assert other.kept is not None and other.penalized is not None
    assert torch.equal(found.kept, other.kept) and torch.equal(found.penalized, other.penalized)
    assert not found.penalized[~trained].any() and found.kept[~trained].all()
    assert torch.equal(found.kept[trained], second_moment_mask(logprobs[trained], behavior[trained], 0.02))
    count = int(trained.sum())
    assert found.shares == {
        "train/masked": float((~found.kept).sum()) / count,
        "train/penalized_cov": int(0.05 * count) / count,
    }


def test_selections_are_joined_and_absent_where_the_key_is_off() -> None:
    logprobs, behavior, advantages = made_batch(4)
    everything = logprobs == logprobs

    def select(**choices: float) -> Selection:
        return select_tokens(TrainerConfig(**choices), logprobs, behavior, advantages, everything, 7)  # type: ignore[arg-type]

    moments, covariances = select(m2_threshold=0.02), select(clip_cov=0.1, clip_cov_low=0.5)
    both = select(m2_threshold=0.02, clip_cov=0.1, clip_cov_low=0.5)
    assert moments.kept is not None and covariances.kept is not None and both.kept is not None
    assert torch.equal(both.kept, moments.kept & covariances.kept)
    assert both.shares == moments.shares | covariances.shares and both.penalized is None
    assert covariances.shares.keys() == {"train/masked_cov"} and covariances.shares["train/masked_cov"] == 0.1
    penalized = select(kl_cov=0.1)
    assert penalized.kept is None and penalized.shares == {"train/penalized_cov": 0.1}
    assert select_tokens(TrainerConfig(kl_cov=0.1), *made_batch(4), ~everything, 7) == Selection()


def test_the_penalty_of_kl_cov_pulls_chosen_tokens_back_to_the_old_policy() -> None:
    config = TrainerConfig(preset="kl_cov", kl_cov_coef=0.7)
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.0], dtype=torch.float64, requires_grad=True)
    proximal = torch.tensor([-1.2, -1.5, -0.9, -1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    chosen = torch.tensor([True, True, False, True])
    tokens = tokens_of(config, logprobs, proximal, advantages, penalized=chosen)
    total = token_losses(tokens, policy_gradient).total
    ratios = [np.exp(0.2), np.exp(-0.5), np.exp(0.4), 1.0]
    expected = [-ratios[0] + 0.7 * (ratios[0] - 1 - 0.2), 2 * ratios[1] + 0.7 * (ratios[1] - 1 + 0.5)]
    expected += [-0.5 * ratios[2], -3.0]
    assert total.tolist() == pytest.approx(expected, abs=1e-12)
    total.sum().backward()
    slopes = [-ratios[0] + 0.7 * (ratios[0] - 1), 2 * ratios[1] + 0.7 * (ratios[1] - 1), -0.5 * ratios[2], -3.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-12)
