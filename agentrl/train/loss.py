"""The loss of each trained token, from the importance ratio to the aggregation, in one place.

    loss = 1 / normalizer * sum_t weight_t * accepted_t * [ mask_t * correction_t * objective(ratio_t, advantage_t)
                                                            + kl_coef * KL_t - entropy_coef * entropy_t ]

Read it from top to bottom: the inputs of a loss (:class:`LossTokens`), the formula above (:func:`token_losses`), then
its terms, one function each. All tensors are ``[tokens]``. Corrections, token masks and rejected sequences are in
:mod:`agentrl.train.corrections`.

Guarantees: a token's loss depends on that token, or on the tokens of its sequence, so micro-batches do not change it;
what needs the whole batch is decided before (:mod:`agentrl.train.batch_selection`). This module only calls methods of
tensors and does not import torch, so that formulas can be shown without it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agentrl.config.declarations import objective, preset
from agentrl.core.registry import load
from agentrl.train.batch_selection import needs_selection
from agentrl.train.corrections import correction_weights, masked_tokens, rejected_tokens
from agentrl.train.sequences import bounded_exp, sequence_means

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.config.algorithm import AlgorithmConfig

# --- Inputs of a loss --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossTokens:
    """Trained tokens with the inputs of their losses. Every tensor is ``[tokens]``.

    Attributes:
        logprobs: Logprobs under the current policy at the sampling temperature; differentiable.
        entropies: Entropies of the current policy over the whole vocabulary, in nats; differentiable.
        behavior: Logprobs under the behavior policy, as the server gave them.
        proximal: Logprobs in the denominator of the importance ratio, see :func:`proximal_logprobs`.
        reference: Logprobs under the reference policy; ``None`` without a KL term in the loss.
        teacher: Logprobs under the teacher; ``None`` without one.
        advantages: Advantage of each token.
        versions: int64, version of the behavior policy.
        mask: bool, false for tokens without surrogate loss, see
            :class:`~agentrl.train.batch_selection.Selection`.
        sequences: int64, number of the token's sequence (a branch of an episode), unique in the batch.
        turns: int64, number of the token's turn in its trajectory.
        version: Policy version that the step starts from.
        config: The recipe's trainer section.
        penalized: bool, true for tokens with the KL penalty of ``trainer.kl_cov``; ``None`` without it.
    """

    logprobs: "Tensor"
    entropies: "Tensor"
    behavior: "Tensor"
    proximal: "Tensor"
    reference: "Tensor | None"
    teacher: "Tensor | None"
    advantages: "Tensor"
    versions: "Tensor"
    mask: "Tensor"
    sequences: "Tensor"
    turns: "Tensor"
    version: int
    config: "AlgorithmConfig"
    penalized: "Tensor | None" = None

    @property
    def ratio(self) -> "Tensor":
        """Importance ratio of each token, or the geometric mean over its sequence (``trainer.ratio``)."""
        return bounded_exp(self.of_ratio_level(self.logprobs - self.proximal))

    @property
    def advantage(self) -> "Tensor":
        """Advantage of each token, or the mean over its sequence (``trainer.ratio``)."""
        return self.of_ratio_level(self.advantages)

    def of_ratio_level(self, values: "Tensor") -> "Tensor":
        """Returns the values, or with ``trainer.ratio=sequence`` at each token their mean over its sequence."""
        return sequence_means(values, self.sequences) if self.config.ratio == "sequence" else values


class Objective(Protocol):
    """A surrogate loss for each token, which ``trainer.objective`` selects.

    Declare your own with :func:`agentrl.config.declarations.objective` if it is 0 for a zero advantage, has a formula
    to show, or needs all tokens of a sequence at once (``whole_sequences``; others may get any part of a micro-batch).
    """

    def __call__(self, tokens: LossTokens) -> "tuple[Tensor, Tensor]":
        """Returns ``[tokens]`` losses to minimise, and ``[tokens]`` bool: whether a bound acted (clipping)."""
        ...


@dataclass(frozen=True)
class TokenLosses:
    """Losses of some tokens, ``[tokens]`` each.

    Attributes:
        total: Loss of each token, before its aggregation weight.
        acted: bool, whether a bound of the objective acted (clipping).
        correction: Weights of :func:`~agentrl.train.corrections.correction_weights`.
        kl: Estimates of the KL to the reference; ``None`` without a KL term in the loss.
        masked: bool, tokens whose mismatch is out of its bounds; ``None`` without bounds.
        rejected: bool, tokens of rejected sequences; ``None`` without ``trainer.reject_by``.
    """

    total: "Tensor"
    acted: "Tensor"
    correction: "Tensor"
    kl: "Tensor | None"
    masked: "Tensor | None" = None
    rejected: "Tensor | None" = None

    def parts(self) -> "dict[str, Tensor]":
        """Returns the optional parts that there are, by the names of their sums."""
        found = {"kl_reference": self.kl, "masked_ratio": self.masked, "rejected": self.rejected}
        return {name: part for name, part in found.items() if part is not None}


def token_losses(tokens: LossTokens, objective: Objective) -> TokenLosses:
    """Computes the loss of each token.

    Raises:
        ValueError: The objective did not return one loss and one bool for each token.
    """
    config = tokens.config
    loss, acted = objective(tokens)
    if loss.shape != tokens.logprobs.shape or acted.shape != tokens.logprobs.shape:
        raise ValueError(
            f"trainer.objective={config.objective} gave shapes {tuple(loss.shape)} and {tuple(acted.shape)} "
            f"for {len(tokens.logprobs)} tokens: want a loss and a bool (whether a bound acted) for each token"
        )
    correction = correction_weights(tokens)
    loss = (loss * correction).masked_fill(~tokens.mask, 0.0)
    if (masked := masked_tokens(tokens)) is not None:
        loss = loss.masked_fill(masked, 0.0)
    kl = None
    if tokens.reference is not None:
        kl = kl_divergence(tokens.logprobs, tokens.reference, config.kl_estimator, config.kl_gradient)
        if config.kl_gradient == "weighted":
            kl = kl * bounded_exp(tokens.logprobs - tokens.behavior)
        loss = loss + config.kl_coef * kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * tokens.entropies
    if tokens.penalized is not None:  # k3 of old and new policy, whose gradient vanishes where they agree
        away = kl_divergence(tokens.proximal, tokens.logprobs, "k3", "plain")
        loss = loss + config.kl_cov_coef * away.masked_fill(~tokens.penalized, 0.0)
    if (rejected := rejected_tokens(tokens)) is not None:
        loss = loss.masked_fill(rejected, 0.0)
    return TokenLosses(loss, acted, correction, kl, masked, rejected)


# --- Importance ratio: its denominator, and the mean over a sequence ----------------------------------------------

PROXIMAL_FORMULAS = {
    "behavior": "pi_behavior(t)",
    "recomputed": "pi_proximal(t), recomputed with the policy that the step starts from",
    "log_linear": "pi_proximal(t), interpolated between behavior and current policy by version",
}


def proximal_logprobs(
    config: "AlgorithmConfig", logprobs: "Tensor", behavior: "Tensor", versions: "Tensor", version: int,
    recomputed: "Tensor | None",
) -> "Tensor":  # fmt: skip
    """Returns the logprobs in the denominator of the importance ratio, as ``trainer.proximal`` says.

    Args:
        config: The recipe's trainer section.
        logprobs: ``[tokens]`` logprobs under the current policy.
        behavior: ``[tokens]`` logprobs under the behavior policy.
        versions: int64 ``[tokens]`` versions of the behavior policy.
        version: Policy version that the step starts from.
        recomputed: ``[tokens]`` logprobs under that version; needed with ``proximal=recomputed``.
    """
    if config.proximal == "recomputed":
        assert recomputed is not None
        return recomputed
    if config.proximal == "log_linear":
        return log_linear_proximal(logprobs, behavior, versions, version)
    return behavior


def log_linear_proximal(logprobs: "Tensor", behavior: "Tensor", versions: "Tensor", version: int) -> "Tensor":
    """Interpolates logprobs by version between behavior and current policy (AReaL, Fu et al. 2025, arXiv:2505.24298).

    The current policy counts as version ``version + 1``. Arguments are those of :func:`proximal_logprobs`.
    """
    share = (version - versions) / (version + 1 - versions)
    return behavior + share.clamp(min=0) * (logprobs.detach() - behavior)


GSPO = preset(
    __name__, "gspo", "Zheng et al. 2025, arXiv:2507.18071", ratio="sequence", clip_eps=3e-4, clip_eps_high=4e-4
)

# --- Objectives ---------------------------------------------------------------------------------------------------


def _bounds(config: "AlgorithmConfig") -> tuple[float, float]:
    return 1 - config.clip_eps, 1 + (config.clip_eps_high or config.clip_eps)


def _clip_formula(config: "AlgorithmConfig") -> str:
    low, high = _bounds(config)
    return f"max(-r_t A, -clamp(r_t, {low:g}, {high:g}) A)"


@objective("clip", formula=_clip_formula, zero_without_advantage=True)
def clip(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    With ``clip_eps_high`` it is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).
    """
    low, high = _bounds(tokens.config)
    ratio, advantage = tokens.ratio, tokens.advantage
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(low, high)
    return unclipped.maximum(clipped), (clipped > unclipped).detach()


GRPO = preset(__name__, "grpo", "Shao et al. 2024, arXiv:2402.03300", kl_gradient="plain")  # its eq. 4: k3 as a term
DAPO = preset(
    __name__, "dapo", "Yu et al. 2025, arXiv:2503.14476; its dynamic sampling is rollout.skip_uniform_groups",
    clip_eps_high=0.28, aggregation="token", mask_truncated=True,
)  # fmt: skip


@objective(
    "dual_clip",
    formula=lambda config: f"min({_clip_formula(config)}, -{config.dual_clip:g} A where A < 0)",
    zero_without_advantage=True,
)
def dual_clip(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """:func:`clip` with a bound on the ratio of negative advantages (Ye et al. 2020, arXiv:1912.09729, eq. 5)."""
    loss, clipped = clip(tokens)
    bound = -tokens.advantage * tokens.config.dual_clip
    beyond = (tokens.advantage < 0) & (loss > bound)
    return bound.where(beyond, loss), clipped | beyond.detach()


@objective(
    "cispo",
    formula=lambda config: f"-stop(min(r_t, {_bounds(config)[1]:g})) A log pi(t)",
    zero_without_advantage=True,
)
def cispo(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """Policy gradient times the detached ratio, bounded from above (MiniMax 2025, arXiv:2506.13585, eq. 4).

    Unlike with :func:`clip`, every token keeps a gradient.
    """
    ratio, (_, high) = tokens.ratio.detach(), _bounds(tokens.config)
    return -ratio.clamp(max=high) * tokens.advantage * tokens.logprobs, ratio > high


CISPO = preset(
    __name__, "cispo", "MiniMax 2025, arXiv:2506.13585", objective="cispo", clip_eps_high=4.0, aggregation="token"
)


@objective(
    "sapo",
    formula=lambda config: (
        f"-4/T sigmoid(T (r_t - 1)) A, T = {config.sapo_temperature:g} where A > 0, "
        f"else {config.sapo_temperature_negative:g}"
    ),
    zero_without_advantage=True,
)
def sapo(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """Soft gate instead of a clip; ``T`` depends on the advantage's sign (Gao et al. 2025, arXiv:2511.20347)."""
    config, ratio, advantage = tokens.config, tokens.ratio, tokens.advantage
    positive = ratio.new_full((), config.sapo_temperature)
    temperature = positive.where(advantage > 0, ratio.new_full((), config.sapo_temperature_negative))
    gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
    return -gate * advantage, ratio.detach() < 0


SAPO = preset(__name__, "sapo", "Gao et al. 2025, arXiv:2511.20347", objective="sapo")


def _dppo_formula(config: "AlgorithmConfig") -> str:
    kind = {"tv": "|pi(t) - pi_behavior(t)|", "kl": "KL(Bernoulli(pi_behavior(t)) || Bernoulli(pi(t)))"}
    bound = dppo_bound(config)
    return f"-r_t A, 0 where {kind[config.dppo_divergence]} > {bound:g} and pi(t) has moved to where A pushes it"


@objective("dppo", formula=_dppo_formula, zero_without_advantage=True)
def dppo(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """Ratio times advantage without the tokens that would leave a trust region (Qi et al. 2026, arXiv:2602.04879).

    A token is left out if the policies diverge by more than the bound at its position and its gradient would move them
    further apart. The divergence is the binary one of the sampled token, from the behavior policy, whatever
    ``trainer.proximal`` is.
    """
    config, advantage = tokens.config, tokens.advantage
    now, before = tokens.logprobs.detach(), tokens.behavior
    further = ((advantage > 0) & (now > before)) | ((advantage < 0) & (now < before))
    left = further & (binary_divergence(now, before, config.dppo_divergence) > dppo_bound(config))
    return (-tokens.ratio * advantage).masked_fill(left, 0.0), left


def dppo_bound(config: "AlgorithmConfig") -> float:
    """Returns the largest divergence of :func:`dppo`; the defaults are those of the paper's released scripts."""
    return config.dppo_threshold or {"tv": 0.15, "kl": 0.05}[config.dppo_divergence]


def binary_divergence(logprobs: "Tensor", behavior: "Tensor", kind: str) -> "Tensor":
    """Returns the divergence of two policies that tell only the sampled token from all others.

    Args:
        logprobs: ``[tokens]`` logprobs of the sampled tokens under the current policy.
        behavior: ``[tokens]`` logprobs under the behavior policy.
        kind: ``tv``, the total variation; ``kl``, the KL from behavior to current policy.
    """
    new, old = logprobs.exp(), behavior.exp()
    if kind == "tv":
        return (new - old).abs()
    others_new, others_old = -logprobs.expm1(), -behavior.expm1()
    smallest = 1e-8  # of the other tokens' probability, so that its logarithm is finite
    others = others_old.clamp(min=smallest).log() - others_new.clamp(min=smallest).log()
    return old * (behavior - logprobs) + others_old * others


DPPO = preset(__name__, "dppo", "Qi et al. 2026, arXiv:2602.04879", objective="dppo", aggregation="token")


@objective("policy_gradient", formula="-r_t A", zero_without_advantage=True)
def policy_gradient(tokens: LossTokens) -> "tuple[Tensor, Tensor]":
    """Ratio times advantage without a bound, negated; REINFORCE if the ratio is 1 (Williams 1992)."""
    ratio = tokens.ratio
    return -ratio * tokens.advantage, ratio.detach() < 0


# --- KL to a reference policy -------------------------------------------------------------------------------------


def kl_divergence(logprobs: "Tensor", reference: "Tensor", estimator: str, gradient: str) -> "Tensor":
    """Estimates the KL to the reference policy from one sample per token (Schulman 2020: k1, k2, k3).

    Args:
        logprobs: ``[tokens]`` logprobs under the current policy; differentiable.
        reference: ``[tokens]`` logprobs under the reference policy.
        estimator: ``k1``, the log ratio; ``k2``, half its square; ``k3``, nonnegative and of low variance.
        gradient: ``plain`` or ``weighted``, the estimator's own gradient; ``unbiased``, the gradient of k2, whose
            expectation is the gradient of the KL (that of k1 is 0, that of k3 belongs to another divergence).
    """
    difference = logprobs - reference
    half = difference.square() / 2
    if estimator == "k1":
        value = difference
    elif estimator == "k2":
        value = half
    else:
        value = (-difference).expm1() + difference  # never negative, in float32 as well
    return value if gradient != "unbiased" else half + (value - half).detach()


# --- Aggregation --------------------------------------------------------------------------------------------------

AGGREGATION_FORMULAS = {
    "token": "1 / (tokens of the batch) * sum_t",
    "sequence": "1 / (sequences) * sum_i 1 / |i| * sum_t",
    "constant": "1 / (sequences * {length}) * sum_t",
    "sum": "1 / (sequences) * sum_t",
}


def token_weight(tokens: int, config: "AlgorithmConfig") -> float:
    """Returns the aggregation weight of each token of a trajectory with ``tokens`` trained tokens in all branches."""
    return 1.0 / tokens if config.aggregation == "sequence" else 1.0


def normalizer(tokens: list[int], config: "AlgorithmConfig") -> float:
    """Returns the divisor of the loss's weighted sum over the global batch.

    Args:
        tokens: Number of trained tokens of each trajectory of the batch, also of tokens with a zero advantage.
        config: The recipe's trainer section.
    """
    trained = [count for count in tokens if count]
    if config.aggregation == "token":
        return float(max(sum(trained), 1))
    length = config.aggregation_length or 1
    return float(max(len(trained), 1) * (length if config.aggregation == "constant" else 1))


def skips_zero_advantages(config: "AlgorithmConfig") -> bool:
    """Returns whether no term of the loss has a gradient for tokens with a zero advantage."""
    plain = (config.kl_coef == 0 or config.kl_in == "reward") and config.entropy_coef == 0
    own = load("objective", config.objective)
    return plain and not needs_selection(config) and getattr(own, "zero_without_advantage", False)


def needs_whole_sequences(config: "AlgorithmConfig") -> bool:
    """Returns whether a token's loss needs the other tokens of its sequence."""
    own = getattr(load("objective", config.objective), "whole_sequences", False)
    by_sequence = config.correction != "none" and config.correction_level == "sequence"
    return own or by_sequence or config.ratio == "sequence" or config.reject_by is not None
