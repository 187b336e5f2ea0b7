"""Reference losses of one token, from the papers: float64 scalars, nothing shared with agentrl.

A surrogate takes a token's importance ratio, its advantage and its logprob under the current policy; it returns the
loss to minimise, and whether a bound acted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Surrogate = Callable[[Tensor, float, Tensor], tuple[Tensor, bool]]


def clipped(low: float, high: float) -> Surrogate:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``: Schulman et al. 2017 eq. 7; DAPO eq. 10 with two bounds."""

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        free, bounded = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
        return -torch.minimum(free, bounded), bool(bounded < free)

    return surrogate


def dual_clipped(low: float, high: float, most: float) -> Surrogate:
    """``-max(min(r A, clip(r) A), most A)`` where A < 0: Ye et al. 2020 eq. 5."""
    plain = clipped(low, high)

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        loss, acted = plain(ratio, advantage, logprob)
        if advantage < 0 and loss.item() > -most * advantage:
            return torch.tensor(-most * advantage, dtype=torch.float64), True
        return loss, acted

    return surrogate


def bounded_weight(high: float) -> Surrogate:
    """``-sg(min(r, 1 + high)) A log pi``: CISPO, MiniMax 2025 eq. 4."""

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        weight = min(ratio.item(), 1 + high)
        return -weight * advantage * logprob, ratio.item() > 1 + high

    return surrogate


def soft_gate(positive: float, negative: float) -> Surrogate:
    """``-(4 / T) sigmoid(T (r - 1)) A`` with T by the advantage's sign: SAPO, Gao et al. 2025."""

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        temperature = positive if advantage > 0 else negative
        return -4 / temperature / (1 + torch.exp(-temperature * (ratio - 1))) * advantage, False

    return surrogate


def trust_region(most: float) -> Surrogate:
    """``-r A``, 0 where policies differ by more than ``most`` and would move on: DPPO, total variation of a token."""

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        now = math.exp(logprob.item())
        moves_on = (advantage > 0 and ratio.item() > 1) or (advantage < 0 and ratio.item() < 1)
        if moves_on and abs(now - now / ratio.item()) > most:
            return ratio * 0, True
        return -ratio * advantage, False

    return surrogate


def bernoulli_region(most: float) -> Surrogate:
    """``-r A``, 0 where the KL of "this token or another" is above ``most`` and would grow: DPPO."""

    def surrogate(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
        now = math.exp(logprob.item())
        before = now / ratio.item()
        divergence = before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))
        if divergence > most and advantage * (now - before) > 0:
            return ratio * 0, True
        return -ratio * advantage, False

    return surrogate


def unbounded(ratio: Tensor, advantage: float, logprob: Tensor) -> tuple[Tensor, bool]:
    """``-r A``: the policy gradient of older samples."""
    return -ratio * advantage, False


def k1(logprob: Tensor, reference: float) -> Tensor:
    """Log ratio (Schulman 2020, Approximating KL Divergence)."""
    return logprob - reference


def k2(logprob: Tensor, reference: float) -> Tensor:
    """Half the squared log ratio."""
    return (logprob - reference) ** 2 / 2


def k3(logprob: Tensor, reference: float) -> Tensor:
    """``r - 1 - log r`` with ``r = reference / policy``: GRPO eq. 4."""
    return torch.exp(reference - logprob) - (reference - logprob) - 1


def rejected(log_ratios: list[float], measure: str, low: float | None, high: float | None) -> bool:
    """Whether a sequence's mismatch is out of its bounds (Liu et al. 2025; verl's ``seq_mean_k1`` to ``seq_mean_k3``).

    Args:
        log_ratios: ``log(trainer / behavior)`` of its tokens; the samples are of the behavior policy.
        measure: ``geometric``: mean ratio; ``k1``, ``k2``, ``k3``: estimates of KL(behavior || trainer).
        low: Lower bound.
        high: Upper bound.
    """
    logs = [torch.tensor(-one, dtype=torch.float64) for one in log_ratios]  # of behavior over trainer
    if measure == "geometric":
        value = math.prod(math.exp(one) for one in log_ratios) ** (1 / len(log_ratios))
    else:
        value = sum({"k1": k1, "k2": k2, "k3": k3}[measure](one, 0.0).item() for one in logs) / len(logs)
    return (low is not None and value < low) or (high is not None and value > high)


@dataclass(frozen=True)
class Kl:
    """KL to the reference policy as a term of the loss.

    Attributes:
        coef: Coefficient.
        value: Estimator.
        gradient: ``plain``: the estimator's; ``unbiased``: that of k2; ``weighted``: the estimator's times the ratio.
    """

    coef: float
    value: Callable[[Tensor, float], Tensor]
    gradient: str

    def term(self, logprob: Tensor, reference: float, behavior: float) -> tuple[Tensor, float]:
        """Returns the term of the loss, and the number that the step's metric is a mean of."""
        estimate = self.value(logprob, reference)
        if self.gradient == "weighted":
            estimate = estimate * torch.exp(logprob - behavior)
        if self.gradient != "unbiased":
            return self.coef * estimate, estimate.item()
        moving = k2(logprob, reference)
        return self.coef * (moving - moving.item() + estimate.item()), estimate.item()


def value_loss(value: Tensor, old: float, goal: float, clip: float | None) -> Tensor:
    """PPO's clipped value loss, half the larger squared error."""
    error = (value - goal) ** 2
    if clip is not None:
        near = old + (value - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - goal) ** 2)
    return error / 2


def most_stable(squares: list[float], threshold: float) -> list[bool]:
    """Whether each token stays when the largest squares go until the mean is at most the threshold (M2PO)."""
    kept = [True] * len(squares)
    while any(kept):
        left = [value for value, stays in zip(squares, kept, strict=True) if stays]
        if sum(left) / len(left) <= threshold:
            break
        kept[max((i for i in range(len(squares)) if kept[i]), key=squares.__getitem__)] = False
    return kept
