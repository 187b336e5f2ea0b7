"""Selections of tokens that need statistics of the whole global batch, made once before its first update.

Guarantees: the same batch and version give the same selection, on any number of ranks and micro-batches; statistics are
in float64. Only methods of tensors are called; torch is not imported.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.config.declarations import preset

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Selection:
    """Tokens of a global batch that a loss treats differently.

    Attributes:
        kept: bool ``[places]``, false for tokens without surrogate loss; ``None`` if all have one.
        penalized: bool ``[places]``, true for tokens with the KL penalty of ``trainer.kl_cov``; ``None`` without it.
        shares: Shares of the batch's trained tokens, by the name of the metric.
    """

    kept: "Tensor | None" = None
    penalized: "Tensor | None" = None
    shares: dict[str, float] = field(default_factory=dict)


def needs_selection(config: "AlgorithmConfig") -> bool:
    """Returns whether the loss needs a :class:`Selection`."""
    return config.m2_threshold is not None or config.clip_cov is not None or config.kl_cov is not None


def select_tokens(
    config: "AlgorithmConfig", logprobs: "Tensor", behavior: "Tensor", advantages: "Tensor", trained: "Tensor",
    version: int,
) -> Selection:  # fmt: skip
    """Selects tokens as ``trainer.m2_threshold``, ``trainer.clip_cov`` and ``trainer.kl_cov`` say.

    Args:
        config: The recipe's trainer section.
        logprobs: ``[places]`` logprobs under the policy that the step starts from.
        behavior: ``[places]`` logprobs under the behavior policy.
        advantages: ``[places]`` advantages.
        trained: bool ``[places]``, false for places without a trained token.
        version: Policy version that the step starts from; seeds the random choice of ``clip_cov``.
    """
    if not bool(trained.any()):
        return Selection()
    everything = trained | ~trained
    kept, penalized, shares = everything.clone(), None, {}
    count = int(trained.sum())

    def covariances() -> "Tensor":
        return logprob_covariances(logprobs[trained], advantages[trained])

    if config.m2_threshold is not None:
        kept[trained] = second_moment_mask(logprobs[trained], behavior[trained], config.m2_threshold)
        shares["train/masked"] = float((~kept).sum()) / count
    if config.clip_cov is not None:
        chosen = clip_cov_tokens(covariances(), config.clip_cov, config.clip_cov_low, config.clip_cov_high, version)
        kept[trained] &= ~chosen
        shares["train/masked_cov"] = float(chosen.sum()) / count
    if config.kl_cov is not None:
        penalized = ~everything
        penalized[trained] = kl_cov_tokens(covariances(), config.kl_cov)
        shares["train/penalized_cov"] = float(penalized.sum()) / count
    masks = config.m2_threshold is not None or config.clip_cov is not None
    return Selection(kept if masks else None, penalized, shares)


def second_moment_mask(proximal: "Tensor", behavior: "Tensor", threshold: float) -> "Tensor":
    """Masks the tokens with the largest squared log ratios until the mean of the others is at most ``threshold``.

    M2PO, Zheng et al. 2025, arXiv:2510.01161.

    Args:
        proximal: ``[tokens]`` logprobs of the whole global batch under the policy that the step starts from.
        behavior: ``[tokens]`` logprobs under the behavior policy.
        threshold: Largest mean squared log ratio of the kept tokens.

    Returns:
        ``[tokens]`` bool, true for kept tokens.
    """
    squares = (proximal - behavior).double().square()
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / ordered.new_ones(len(ordered)).cumsum(0)
    keep = squares < 0
    keep[order[: int((means <= threshold).sum())]] = True  # means of sorted values never fall
    return keep


M2PO = preset(
    __name__, "m2po", "Zheng et al. 2025, arXiv:2510.01161",
    objective="policy_gradient", m2_threshold=0.04, aggregation="token",
)  # fmt: skip


def logprob_covariances(logprobs: "Tensor", advantages: "Tensor") -> "Tensor":
    """Returns each token's part of the batch's covariance of logprob and advantage, ``[tokens]`` float64.

    ``(log pi(t) - mean) * (A_t - mean)`` over all given tokens; large values drive the entropy down. Cui et al. 2025
    (The Entropy Mechanism), arXiv:2505.22617.
    """
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_tokens(covariances: "Tensor", share: float, low: float, high: float, seed: int) -> "Tensor":
    """Chooses tokens at random among those with a covariance between the bounds (Clip-Cov, arXiv:2505.22617).

    Args:
        covariances: ``[tokens]`` results of :func:`logprob_covariances`.
        share: Share of all tokens to choose; at least one token is chosen, as in the released code.
        low: Lower bound of the covariance, exclusive.
        high: Upper bound of the covariance, exclusive.
        seed: Seed of the choice.

    Returns:
        ``[tokens]`` bool, true for chosen tokens.
    """
    chosen = covariances != covariances
    between = ((covariances > low) & (covariances < high)).nonzero().flatten()
    wanted = min(_count(share, len(covariances)), len(between))
    chosen[between[random.Random(seed).sample(range(len(between)), wanted)]] = True
    return chosen


def kl_cov_tokens(covariances: "Tensor", share: float) -> "Tensor":
    """Chooses the share of tokens with the largest covariances, at least one (KL-Cov, arXiv:2505.22617).

    The loss adds ``kl_cov_coef`` times an estimate of ``KL(old policy || pi)`` for them: k3, which is smooth. The
    released code takes ``|log r|``, whose gradient is a random sign where rounding alone tells the policies apart.

    Returns:
        ``[tokens]`` bool, true for chosen tokens; of equal covariances the first are chosen.
    """
    chosen = covariances != covariances
    chosen[covariances.argsort(descending=True, stable=True)[: _count(share, len(covariances))]] = True
    return chosen


def _count(share: float, tokens: int) -> int:
    return max(1, int(share * tokens))


CLIP_COV = preset(
    __name__, "clip_cov", "Cui et al. 2025 (The Entropy Mechanism), arXiv:2505.22617",
    clip_cov=2e-4, clip_cov_low=1.0, clip_cov_high=5.0, aggregation="token",
)  # fmt: skip
KL_COV = preset(
    __name__, "kl_cov", "Cui et al. 2025 (The Entropy Mechanism), arXiv:2505.22617",
    objective="policy_gradient", kl_cov=2e-3, kl_cov_coef=1.0, aggregation="token",
)  # fmt: skip
