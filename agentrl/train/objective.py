"""The policy objective, per token: surrogates, and what is weighed, masked and added around them.

Guarantees: every surrogate is elementwise over tokens, and everything else looks at one sequence at most, so how a
batch is split cannot change a token's loss. Summing and normalising is the caller's, over the whole global batch.
"""

from typing import Protocol

import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load

Loss = tuple[Tensor, Tensor]


class Objective(Protocol):
    """What ``trainer.objective`` names: a loss per token.

    A function whose loss is 0, with its gradient, wherever the advantage is 0 may say so by an attribute
    ``zero_without_advantage = True``: such tokens are then not computed at all.
    """

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
        """One loss per token.

        Args:
            logprobs: ``[tokens]`` of the current policy; gradients flow through it. With ``trainer.ratio=sequence`` the
                mean of the token's sequence.
            old_logprobs: ``[tokens]`` of the proximal policy, in the same way.
            advantages: ``[tokens]``.
            config: The recipe's trainer section.

        Returns:
            ``[tokens]`` loss, and ``[tokens]`` bool: where a bound acted.
        """
        ...


def clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
    """The clipped surrogate, negated. See :class:`Objective`.

    PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7; with ``clip_eps_high`` DAPO's clip-higher (arXiv:2503.14476).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_eps, 1 + (config.clip_eps_high or config.clip_eps))
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()


def dual_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
    """:func:`clip` with a second bound, ``dual_clip``, on the ratio of negative advantages. See :class:`Objective`.

    Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    loss, clipped = clip(logprobs, old_logprobs, advantages, config)
    bound = -advantages * config.dual_clip
    beyond = (advantages < 0) & (loss > bound)
    return torch.where(beyond, bound, loss), clipped | beyond.detach()


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
    """Policy gradient weighed by the ratio, which is bounded from above and carries none. See :class:`Objective`.

    No token is lost. MiniMax 2025, arXiv:2506.13585, eq. 4.
    """
    ratio = torch.exp(logprobs - old_logprobs).detach()
    bound = 1 + (config.clip_eps_high or config.clip_eps)
    return -ratio.clamp(max=bound) * advantages * logprobs, ratio > bound


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
    """A soft gate instead of a clip, ``4 / t * sigmoid(t * (ratio - 1))``. See :class:`Objective`.

    The temperature ``t`` is another for negative advantages. Gao et al. 2025, arXiv:2511.20347.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    temperature = torch.where(advantages > 0, config.sapo_temperature, config.sapo_temperature_negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -gate * advantages, torch.zeros_like(ratio, dtype=torch.bool)


def policy_gradient(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig) -> Loss:
    """The ratio times the advantage, without a bound: REINFORCE where the ratio is 1. See :class:`Objective`."""
    ratio = torch.exp(logprobs - old_logprobs)
    return -ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)


for _surrogate in (clip, dual_clip, cispo, sapo, policy_gradient):
    _surrogate.zero_without_advantage = True  # type: ignore[attr-defined]


def skips_zero_advantages(config: TrainerConfig) -> bool:
    """Whether tokens without advantage carry no gradient: no term of the loss needs them."""
    objective = load("objective", config.objective)
    plain = (config.kl_coef == 0 or config.kl_in == "reward") and config.entropy_coef == 0
    return plain and config.m2_threshold is None and getattr(objective, "zero_without_advantage", False)


def sequence_means(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean of each token's sequence, at each token.

    Args:
        values: ``[tokens]``.
        sequences: int64 ``[tokens]``: which sequence a token belongs to.
    """
    _, place = torch.unique(sequences, return_inverse=True)
    count = int(place.max()) + 1 if len(place) else 0
    sums = values.new_zeros(count).index_add(0, place, values)
    sizes = values.new_zeros(count).index_add(0, place, torch.ones_like(values))
    return (sums / sizes)[place]


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """The sum over each token's sequence, at each token; see :func:`sequence_means`."""
    _, place = torch.unique(sequences, return_inverse=True)
    count = int(place.max()) + 1 if len(place) else 0
    return values.new_zeros(count).index_add(0, place, values)[place]


def log_linear_proximal(logprobs: Tensor, behavior: Tensor, versions: Tensor, step: int) -> Tensor:
    """A guess at the logprobs of the policy that the step starts from.

    They are taken to lie between those of the behavior and the current policy, as far along as the version does (AReaL,
    arXiv:2505.24298).

    Args:
        logprobs: ``[tokens]`` of the current policy, version ``step + 1``.
        behavior: ``[tokens]`` of the policies that sampled.
        versions: int64 ``[tokens]`` of those.
        step: Version that the step starts from.
    """
    share = (step - versions) / (step + 1 - versions)
    return behavior + share.clamp(min=0) * (logprobs.detach() - behavior)


def mismatch_weights(proximal: Tensor, behavior: Tensor, sequences: Tensor, config: TrainerConfig) -> Tensor:
    """``[tokens]`` weights ``proximal / behavior``, of tokens or the product over their sequences.

    Bounded as ``correction`` says: truncated importance sampling (Yao et al. 2025) or masked (Liu et al. 2025, both on
    the mismatch of training and inference).
    """
    difference = (proximal - behavior).detach()
    if config.correction_level == "sequence":
        difference = sequence_sums(difference, sequences)
    weights = torch.exp(difference)
    if config.correction == "truncate":
        return weights.clamp(max=config.correction_cap)
    if config.correction == "mask":
        return torch.where(weights > config.correction_cap, 0.0, weights)
    return weights


def second_moment_mask(proximal: Tensor, behavior: Tensor, threshold: float) -> Tensor:
    """Which tokens stay so that the mean squared log ratio of those is at most ``threshold``; the largest go first.

    M2PO, Zheng et al. 2025, arXiv:2510.01161.

    Args:
        proximal: ``[tokens]`` of the whole global batch.
        behavior: ``[tokens]``.
        threshold: Of the mean.

    Returns:
        ``[tokens]`` bool.
    """
    squares = (proximal - behavior).double().square()
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order[: int((means <= threshold).sum())]] = True  # means of sorted values never fall
    return keep


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: str, gradient: str) -> Tensor:
    """Estimate of the KL to a reference from one sample per token (Schulman 2020: k1, k2, k3), ``[tokens]``.

    Args:
        logprobs: Of the policy; gradients flow through it.
        reference: Of the reference.
        estimator: ``k1``, the log ratio; ``k2``, half its square; ``k3``, which is never negative and varies little.
        gradient: ``plain`` or ``weighted``, the estimator's own; ``unbiased``, that of k2, whose expectation on samples
            of the policy is the gradient of the KL (k1's is 0, k3's that of another divergence).
    """
    difference = logprobs - reference
    value = {
        "k1": lambda: difference,
        "k2": lambda: difference.square() / 2,
        "k3": lambda: torch.exp(-difference) - 1 + difference,
    }[estimator]()
    if gradient != "unbiased":
        return value
    half = difference.square() / 2
    return half + (value - half).detach()
