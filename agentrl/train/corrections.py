"""Corrections of off-policy tokens: importance weights, masks of tokens, rejection of whole sequences.

The *mismatch* of a token is the probability ratio of the trainer's policy and the behavior policy, ``m_t``. The
trainer's policy is the one that the step starts from if ``trainer.proximal=recomputed``, and else the current one.

Guarantees: a mismatch of 1 masks and rejects nothing; no gradient goes through a weight, a mask or a rejection; the
loss's normalizer counts masked and rejected tokens too, so leaving them out never raises the weight of the others. Only
methods of tensors are called; torch is not imported.
"""

from typing import TYPE_CHECKING

from agentrl.config.declarations import preset
from agentrl.train.sequences import bounded_exp, sequence_means, sequence_sums

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.train.loss import LossTokens


def correction_weights(tokens: "LossTokens") -> "Tensor":
    """Computes importance weights ``proximal / behavior``, bounded as ``trainer.correction`` says; 1 for ``none``.

    ``truncate`` is truncated importance sampling (Yao et al. 2025), ``mask`` drops larger weights (Liu et al. 2025;
    both on the mismatch of training and inference). ``correction_level=sequence`` takes the product over a sequence.
    """
    config = tokens.config
    if config.correction == "none":
        return tokens.behavior.new_ones(len(tokens.behavior))
    difference = (tokens.proximal - tokens.behavior).detach()
    if config.correction_level == "sequence":
        difference = sequence_sums(difference, tokens.sequences)
    weights = bounded_exp(difference)
    if config.correction == "truncate":
        return weights.clamp(max=config.correction_cap)
    if config.correction == "mask":
        return weights.masked_fill(weights > config.correction_cap, 0.0)
    return weights


DECOUPLED = preset(
    __name__, "decoupled", "Fu et al. 2025 (AReaL), arXiv:2505.24298; Hilton et al. 2022, arXiv:2110.00641",
    proximal="recomputed", correction="truncate", correction_cap=5.0, minibatches=4, aggregation="token",
)  # fmt: skip


def log_mismatch(tokens: "LossTokens") -> "Tensor":
    """Returns ``[tokens]`` log probability ratios of the trainer's policy and the behavior policy, without gradient."""
    trainer = tokens.proximal if tokens.config.proximal == "recomputed" else tokens.logprobs
    return (trainer - tokens.behavior).detach()


def masked_tokens(tokens: "LossTokens") -> "Tensor | None":
    """Returns ``[tokens]`` bool, true where the mismatch is out of its bounds; ``None`` without bounds.

    IcePop's two-sided mask (Ling Team 2025, arXiv:2510.18855): such tokens have no surrogate loss.
    """
    low, high = tokens.config.token_mask_low, tokens.config.token_mask_high
    return None if low is None and high is None else _outside(log_mismatch(tokens).exp(), low, high)


ICEPOP = preset(
    __name__, "icepop", "Ling Team 2025 (Ring-1T), arXiv:2510.18855",
    proximal="recomputed", correction="weight", token_mask_low=0.5, token_mask_high=5.0,
)  # fmt: skip


def rejected_tokens(tokens: "LossTokens") -> "Tensor | None":
    """Returns ``[tokens]`` bool, true in sequences whose :func:`sequence_mismatch` is out of its bounds.

    Such sequences have no loss at all, also none for KL and entropy. ``None`` without ``trainer.reject_by``.
    """
    config = tokens.config
    if config.reject_by is None:
        return None
    found = sequence_mismatch(log_mismatch(tokens), tokens.sequences, config.reject_by)
    return _outside(found, config.reject_low, config.reject_high)


def sequence_mismatch(log_ratios: "Tensor", sequences: "Tensor", measure: str) -> "Tensor":
    """Measures at each token the mismatch of its sequence by a mean, which unlike a product does not grow with length.

    The measures are those of sequence-level rejection in Liu et al. 2025 (When Speed Kills Stability) and in verl's
    ``rollout_rs`` (``seq_mean_k1`` to ``seq_mean_k3``). Samples are of the behavior policy, so the means of k1 and k3
    estimate the KL from behavior to trainer's policy (Schulman 2020).

    Args:
        log_ratios: ``[tokens]`` results of :func:`log_mismatch`.
        sequences: int64 ``[tokens]`` number of each token's sequence.
        measure: ``geometric``, the geometric mean of ``m_t``; or the mean of ``k1 = -log m_t``,
            ``k2 = (log m_t)^2 / 2`` or ``k3 = m_t - 1 - log m_t``.
    """
    if measure == "geometric":
        return sequence_means(log_ratios, sequences).exp()
    if measure == "k1":
        return sequence_means(-log_ratios, sequences)
    if measure == "k2":
        return sequence_means(log_ratios.square() / 2, sequences)
    return sequence_means(log_ratios.expm1() - log_ratios, sequences)


def _outside(values: "Tensor", low: float | None, high: float | None) -> "Tensor":
    found = values != values  # NaN is out of all bounds
    if low is not None:
        found = found | (values < low)
    return found if high is None else found | (values > high)
