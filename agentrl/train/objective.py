"""The policy objective, per token; summing and normalising is the caller's.

Guarantees: every function is elementwise over tokens, so how a batch is split cannot change a token's loss. The caller
divides by a count over the whole global batch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.core.registry import load


@dataclass(frozen=True)
class ClipRange:
    """Trust region of the probability ratio: ``[1 - low, 1 + high]``; ``high > low`` is DAPO's clip-higher."""

    low: float = 0.2
    high: float = 0.2


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipRange
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss (PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7), negated, per token.

    Args:
        logprobs: ``[tokens]`` of the current policy; gradients flow through it.
        old_logprobs: ``[tokens]`` of the policy that sampled.
        advantages: ``[tokens]``.
        clip: Trust region.

    Returns:
        ``[tokens]`` loss, and ``[tokens]`` bool: where the clip cut the gradient off.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()


class Objective(Protocol):
    """What ``trainer.objective`` names: a loss per token.

    A function whose loss is 0, with its gradient, wherever the advantage is 0 may say so by an attribute
    ``zero_without_advantage = True``: such tokens are then not computed at all.
    """

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig
    ) -> tuple[Tensor, Tensor]:
        """See :func:`clip`."""
        ...


def clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: TrainerConfig
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The objective ``clip``: :func:`clipped_policy_loss` with the recipe's range.

    Args:
        logprobs: ``[tokens]`` of the current policy; gradients flow through it.
        old_logprobs: ``[tokens]`` of the policy that sampled.
        advantages: ``[tokens]``.
        config: The recipe's trainer section.

    Returns:
        ``[tokens]`` loss, and ``[tokens]`` bool: where a bound cut the gradient off.
    """
    bounds = ClipRange(config.clip_eps, config.clip_eps_high or config.clip_eps)
    return clipped_policy_loss(logprobs, old_logprobs, advantages, bounds)


clip.zero_without_advantage = True  # type: ignore[attr-defined]


def skips_zero_advantages(config: TrainerConfig) -> bool:
    """Whether tokens without advantage carry no gradient: no term of the loss needs them."""
    objective = load("objective", config.objective)
    plain = config.kl_coef == 0 and config.entropy_coef == 0
    return plain and getattr(objective, "zero_without_advantage", False)


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Low-variance non-negative estimate of the KL to a reference (Schulman 2020, "k3"), ``[tokens]``."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1
