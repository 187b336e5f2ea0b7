"""Measures how far the trainer's policy is from the behavior policy, token by token and sequence by sequence.

Here ``r = pi(t) / pi_behavior(t)``, with ``pi`` the trainer's policy before the step's first update, and the sampled
tokens are draws from the behavior policy. Every metric stands for all tokens, and again for the tokens of each age.

Guarantees: all metrics are functions of sums and maxima over tokens and sequences, so parts of a batch merge exactly; a
metric is absent where no token was measured; sums are in float64 and stay finite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from agentrl.config.recipe import TrainerConfig
from agentrl.train.loss import LossTokens, correction_weights, proximal_logprobs

AGES = ("", "/age_0", "/age_1", "/age_2+")
"""Suffixes of the metrics: all tokens, then tokens that the step's own version sampled, or one or more steps before."""

_LARGEST = 300.0  # bound of a log ratio, so that the square of the ratio is finite

_TOKEN_SUMS: tuple[str, ...] = (
    "tokens", "measured", "entropy", "behavior", "trainer", "log_ratio", "k1", "k3", "ratio", "ratio_square",
    "deviation_square", "clip_low", "clip_high", "correction_low", "correction_high",
)  # fmt: skip
_SEQUENCE_SUMS: tuple[str, ...] = ("sequences", "sequence_ratio", "sequence_ratio_square", "sequence_deviation_square")
SUMS: tuple[str, ...] = (*_TOKEN_SUMS, *_SEQUENCE_SUMS)


@dataclass(frozen=True, eq=False)
class MeasuredTokens:
    """Tokens whose logprobs were computed before the first update of a step. Every tensor is ``[tokens]``.

    Attributes:
        logprobs: Logprobs under the trainer's policy.
        entropies: Entropies of the trainer's policy over the vocabulary, in nats.
        behavior: Logprobs under the behavior policy.
        advantages: Advantage of each token.
        versions: int64, version of the behavior policy.
        sequences: int64, number of the token's sequence, unique in the batch.
        turns: int64, number of the token's turn in its trajectory.
        token_ids: int64, id of each token.
        weights: Number of the batch's tokens that each token stands for; the same for all tokens of a sequence.
    """

    logprobs: Tensor
    entropies: Tensor
    behavior: Tensor
    advantages: Tensor
    versions: Tensor
    sequences: Tensor
    turns: Tensor
    token_ids: Tensor
    weights: Tensor

    @classmethod
    def joined(cls, parts: Sequence["MeasuredTokens"]) -> "MeasuredTokens":
        """Returns the tokens of several parts, at least one."""
        return cls(**{field.name: torch.cat([getattr(one, field.name) for one in parts]) for field in fields(cls)})

    def select(self, chosen: Tensor) -> "MeasuredTokens":
        """Returns the tokens where ``chosen``, a bool tensor ``[tokens]``, is true."""
        return MeasuredTokens(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def doubled(self) -> "MeasuredTokens":
        """Returns the same tokens with floating-point tensors in float64."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return MeasuredTokens(**{k: v.double() if v.is_floating_point() else v for k, v in values.items()})


def mismatch_sums(tokens: MeasuredTokens, config: TrainerConfig, version: int) -> tuple[Tensor, Tensor]:
    """Sums over tokens that hold whole sequences.

    Args:
        tokens: Measured tokens.
        config: The recipe's trainer section, whose bounds are counted.
        version: Policy version that the step starts from.

    Returns:
        ``[4, sums]`` float64 sums for each of :data:`AGES`, in the order of :data:`SUMS`; ``[4, 2]`` float64, the
        largest ``|r - 1|`` and the id of its token (0 and -1 without tokens).
    """
    tokens = tokens.doubled()
    cuts = _cuts(tokens, config, version)
    ages = (version - tokens.versions).clamp(0, 2)
    sums, worst = [], []
    for chosen in (ages >= 0, ages == 0, ages == 1, ages == 2):
        part = tokens.select(chosen)
        found = _token_sums(part) | _sequence_sums(part)
        found |= {name: (part.weights * cut[chosen]).sum() for name, cut in cuts.items()}
        sums.append(torch.stack([found[name] for name in SUMS]))
        worst.append(_worst(part))
    return torch.stack(sums), torch.stack(worst)


def _log_ratios(tokens: MeasuredTokens) -> Tensor:
    return (tokens.logprobs - tokens.behavior).clamp(-_LARGEST, _LARGEST)


def _token_sums(tokens: MeasuredTokens) -> dict[str, Tensor]:
    weights, log_ratios = tokens.weights, _log_ratios(tokens)
    ratios, deviations = log_ratios.exp(), log_ratios.expm1()
    terms = {
        "tokens": torch.ones_like(weights),
        "entropy": tokens.entropies,
        "behavior": tokens.behavior,
        "trainer": tokens.logprobs,
        "log_ratio": log_ratios.abs(),
        "k1": -log_ratios,
        "k3": deviations - log_ratios,
        "ratio": ratios,
        "ratio_square": ratios.square(),
        "deviation_square": deviations.square(),
    }
    return {name: (weights * term).sum() for name, term in terms.items()} | {
        "measured": weights.new_tensor(float(len(weights)))
    }


def _sequence_sums(tokens: MeasuredTokens) -> dict[str, Tensor]:
    """Sums over sequences, whose ratio is the product over their tokens."""
    sequences, places = tokens.sequences.unique(return_inverse=True)
    nothing = tokens.weights.new_zeros(len(sequences))
    weights = nothing.index_put((places,), tokens.weights)
    log_ratios = nothing.index_add(0, places, tokens.logprobs - tokens.behavior).clamp(-_LARGEST, _LARGEST)
    ratios = log_ratios.exp()
    terms = (torch.ones_like(weights), ratios, ratios.square(), log_ratios.expm1().square())
    return {name: (weights * term).sum() for name, term in zip(_SEQUENCE_SUMS, terms, strict=True)}


def _cuts(tokens: MeasuredTokens, config: TrainerConfig, version: int) -> dict[str, Tensor]:
    """Returns ``[tokens]`` bool by name: which tokens a bound cuts from below or from above."""
    kept = torch.ones_like(tokens.versions, dtype=torch.bool)
    plain = LossTokens(
        logprobs=tokens.logprobs, entropies=tokens.entropies, behavior=tokens.behavior, proximal=tokens.behavior,
        reference=None, teacher=None, advantages=tokens.advantages, versions=tokens.versions, mask=kept,
        sequences=tokens.sequences, turns=tokens.turns, version=version, config=config,
    )  # fmt: skip
    ratios = plain.ratio
    found = {
        "clip_low": ratios < 1 - config.clip_eps,
        "clip_high": ratios > 1 + (config.clip_eps_high or config.clip_eps),
    }
    if config.correction == "none":
        return found | {"correction_low": ~kept, "correction_high": ~kept}
    proximal = proximal_logprobs(
        config, tokens.logprobs, tokens.behavior, tokens.versions, version, recomputed=tokens.logprobs
    )
    bounded = replace(plain, proximal=proximal)
    free = replace(bounded, config=config.model_copy(update={"correction": "weight"}))
    before, after = correction_weights(free), correction_weights(bounded)
    return found | {
        "correction_low": (after != before) & (before < 1),
        "correction_high": (after != before) & (before >= 1),
    }


def _worst(tokens: MeasuredTokens) -> Tensor:
    if not len(tokens.logprobs):
        return tokens.logprobs.new_tensor([0.0, -1.0])
    largest, place = _log_ratios(tokens).expm1().abs().max(0)
    return torch.stack([largest, tokens.token_ids[place].double()])


def mismatch_metrics(sums: Tensor, worst: Tensor, config: TrainerConfig) -> dict[str, float]:
    """Computes the metrics ``mismatch/NAME`` and ``mismatch/NAME/age_K`` from merged sums.

    ``log_ratio`` is the mean of ``|log r|``. ``kl`` and ``kl_k1`` estimate KL(behavior || trainer) per token (k3 and k1
    of Schulman 2020, Approximating KL Divergence). ``chi2`` is the mean of ``(r - 1)²``, Pearson's chi-square
    divergence of the trainer's policy from the behavior policy. ``ess`` is ``(sum r)² / (n sum r²)``, the effective
    sample size as a share of the sample (Kong 1992, A Note on Importance Sampling Using Standardized Weights).
    ``chi2_sequence`` and ``ess_sequence`` are the same for the products of ``r`` over each sequence's tokens of that
    age. ``perplexity_*`` is the exponential of the mean negative logprob. ``clip_low`` and ``clip_high`` are the shares
    of tokens whose ratio is outside the clip range, ``correction_low`` and ``correction_high`` those whose correction
    weight a bound changed, below or above 1. ``ratio_max`` is the largest ``|r - 1|`` and ``ratio_token`` the id of its
    token. ``tokens`` is the number of tokens that were measured.

    Args:
        sums: ``[4, sums]``, see :func:`mismatch_sums`.
        worst: ``[4, 2]``.
        config: The recipe's trainer section.
    """
    found: dict[str, float] = {}
    for age, row, (deviation, token) in zip(AGES, sums.tolist(), worst.tolist(), strict=True):
        total = dict(zip(SUMS, row, strict=True))
        if total["tokens"] > 0:
            one = _of_sums(total, config) | {"ratio_max": deviation, "ratio_token": token}
            found |= {f"mismatch/{name}{age}": value for name, value in one.items()}
    return found


def _of_sums(total: dict[str, float], config: TrainerConfig) -> dict[str, float]:
    count, sequences = total["tokens"], total["sequences"]
    found = {
        "tokens": total["measured"],
        "log_ratio": total["log_ratio"] / count,
        "kl": total["k3"] / count,
        "kl_k1": total["k1"] / count,
        "chi2": total["deviation_square"] / count,
        "chi2_sequence": total["sequence_deviation_square"] / sequences,
        "ess": total["ratio"] ** 2 / (count * total["ratio_square"]),
        "ess_sequence": total["sequence_ratio"] ** 2 / (sequences * total["sequence_ratio_square"]),
        "perplexity_behavior": _perplexity(total["behavior"] / count),
        "perplexity_trainer": _perplexity(total["trainer"] / count),
        "clip_low": total["clip_low"] / count,
        "clip_high": total["clip_high"] / count,
    }
    if config.correction != "none":
        found |= {name: total[name] / count for name in ("correction_low", "correction_high")}
    return found


def _perplexity(mean_logprob: float) -> float:
    return math.exp(min(-mean_logprob, _LARGEST))
