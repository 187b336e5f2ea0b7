"""Writes the loss of a trainer section as a formula to compare with the papers; does not import torch."""

from agentrl.config.algorithm import COMPARING, AlgorithmConfig
from agentrl.config.baseline import BASELINE_FORMULAS
from agentrl.config.declarations import find_preset, formula_of, takes_token_penalties
from agentrl.train.loss import AGGREGATION_FORMULAS, PROXIMAL_FORMULAS

_DIVISORS = {
    "group": " / std({} of the group)",
    "batch": " / std({} of the batch)",
    "mean": " / mean({} of the group)",
    "none": "",
}
_KL_VALUES = {
    "k1": "log pi(t) / reference(t)",
    "k2": "(log pi(t) / reference(t))^2 / 2",
    "k3": "reference(t) / pi(t) - 1 - log reference(t) / pi(t)",
}
# The KL of which an estimator's own gradient, without the samples' score, is one sample (Schulman 2020).
_KL_OF_GRADIENT = {"k1": "nothing (its mean is 0)", "k2": "KL(pi || reference)", "k3": "KL(reference || pi)"}


def formula(trainer: AlgorithmConfig) -> list[str]:
    """Returns the lines that describe the minimised loss."""
    length = trainer.aggregation_length or "sampling.max_new_tokens"
    aggregation = AGGREGATION_FORMULAS[trainer.aggregation].format(length=length)
    factors = ""
    if trainer.m2_threshold is not None or trainer.clip_cov is not None or _bounds_tokens(trainer):
        factors += "m_t * "
    if trainer.correction != "none":
        factors += "w_t * "
    terms = f"{factors}{_surrogate(trainer)}"
    if trainer.kl_coef and trainer.kl_in == "loss":
        terms += f" + {trainer.kl_coef:g} * {trainer.kl_estimator}(pi || reference)"
    if trainer.entropy_coef:
        terms += f" - {trainer.entropy_coef:g} * H_t"
    if trainer.kl_cov is not None:
        denominator = PROXIMAL_FORMULAS[trainer.proximal].partition(",")[0]
        terms += f" + {trainer.kl_cov_coef:g} * c_t k3({denominator} || pi(t))"
    rejected = "" if trainer.reject_by is None else "a_i * "
    lines = [f"loss = {aggregation} {rejected}[{terms}]"]
    if trainer.ratio == "token":
        lines.append(f"r_t = pi(t) / {PROXIMAL_FORMULAS[trainer.proximal]}")
    else:
        lines.append(f"r_t = exp(mean over the sequence of log pi(t) - log {PROXIMAL_FORMULAS[trainer.proximal]})")
    lines.append(f"A = {_advantage(trainer)}")
    if trainer.advantage in COMPARING and BASELINE_FORMULAS[trainer.baseline]:
        lines.append(BASELINE_FORMULAS[trainer.baseline])
    lines += _return_lines(trainer)
    lines += _weights(trainer)
    if trainer.minibatches > 1:
        lines.append(f"{trainer.minibatches} updates a batch, each over its share of the groups")
    return [*lines, f"preset {trainer.preset}: {find_preset(trainer.preset).source}"]


def _surrogate(trainer: AlgorithmConfig) -> str:
    return formula_of("objective", trainer.objective, trainer) or f"{trainer.objective}(r_t, A)"


def _advantage(trainer: AlgorithmConfig) -> str:
    base = formula_of("advantage", trainer.advantage, trainer)
    text = base or f"{trainer.advantage}(rewards)"
    if base and _DIVISORS[trainer.scale_rewards]:
        text = f"({text}){_DIVISORS[trainer.scale_rewards].format('G' if trainer.advantage == 'turns' else 'R')}"
    if trainer.kl_coef and trainer.kl_in == "reward":
        penalty = f"{trainer.kl_coef:g} *"
        if takes_token_penalties(trainer.advantage):
            text += f", each token's reward minus {penalty} log pi_behavior(t) / reference(t), from there to the end"
        else:
            text += f", R_i minus {penalty} sum_t log pi_behavior(t) / reference(t)"
    if trainer.distill_coef:
        teacher = f"{trainer.distill_coef:g} * log(pi_behavior(t) / teacher(t))"
        text = f"-{teacher}" if trainer.advantage == "none" else f"{text}, minus {teacher}"
    if trainer.whiten == "batch":
        text += ", then whitened over the tokens of the batch"
    return text


def _return_lines(trainer: AlgorithmConfig) -> list[str]:
    """Returns the definitions of returns and values for an advantage of turns or tokens."""
    gamma = trainer.discount
    if trainer.advantage == "turns":
        return [f"G_k = reward of turn k + {gamma:g} * G of the turn after it in time"]
    if trainer.advantage != "gae":
        return []
    advantage = (
        "(the sum above)" if trainer.whiten == "batch" or trainer.distill_coef else "A"
    )  # the critic's target uses the advantage before whitening and distillation
    clip = "" if trainer.critic_clip is None else f", V(t) clipped to V_before(t) +- {trainer.critic_clip:g}"
    lines = [
        f"delta_t = reward at t + gamma V(t+1) - V(t), gamma = {gamma:g}, lambda = {trainer.gae_lambda:g}",
        f"critic: loss = mean over tokens of (V(t) - {advantage} - V_before(t))^2 / 2{clip}",
    ]
    if trainer.critic_warmup:
        lines.append(f"only the critic learns in the first {trainer.critic_warmup} steps")
    return lines


def _weights(trainer: AlgorithmConfig) -> list[str]:
    lines = []
    if trainer.correction != "none":
        of = "product over the sequence of " if trainer.correction_level == "sequence" else ""
        bound = {
            "weight": "",
            "truncate": f", at most {trainer.correction_cap:g}",
            "mask": f", 0 above {trainer.correction_cap:g}",
        }[trainer.correction]
        lines.append(f"w_t = {of}pi_proximal(t) / pi_behavior(t){bound}")
    if trainer.m2_threshold is not None:
        lines.append(
            f"m_t = 0 for the largest (log pi_proximal(t) / pi_behavior(t))^2 until their mean is at most "
            f"{trainer.m2_threshold:g}"
        )
    lines += _masks(trainer)
    if trainer.mask_truncated:
        left = "count only in their group's mean" if trainer.advantage in COMPARING else "are not trained on"
        lines.append(f"episodes that were cut (last answer at its length limit, truncated, or out of context) {left}")
    if trainer.kl_coef:
        kind = {
            "frozen": "the starting policy",
            "ema": f"a moving average of the policy with decay {trainer.reference_decay:g} per step",
            "reset": f"the policy, copied every {trainer.reference_every} steps",
        }[trainer.reference]
        lines += [*_kl(trainer), f"reference = {kind}"]
    if trainer.distill_coef:
        lines.append("teacher = teacher.model at temperature 1, given the same tokens before t")
    return lines


def _bounds_tokens(trainer: AlgorithmConfig) -> bool:
    return trainer.token_mask_low is not None or trainer.token_mask_high is not None


def _bounds(low: float | None, high: float | None) -> str:
    parts = [f"below {low:g}" if low is not None else "", f"above {high:g}" if high is not None else ""]
    return " or ".join(part for part in parts if part)


def _masks(trainer: AlgorithmConfig) -> list[str]:
    """Returns the definitions of masks of tokens, rejection of sequences and the penalty of some tokens."""
    lines = []
    policy = "pi_proximal" if trainer.proximal == "recomputed" else "pi"
    mismatch = f"{policy}(t) / pi_behavior(t)"
    if _bounds_tokens(trainer):
        lines.append(f"m_t = 0 where {mismatch} is {_bounds(trainer.token_mask_low, trainer.token_mask_high)}")
    covariance = "(log pi_start(t) - mean) (A - mean) over the batch, pi_start = the policy that the step starts from"
    if trainer.clip_cov is not None:
        lines.append(
            f"m_t = 0 for {trainer.clip_cov:g} of the batch's tokens, drawn from those with a covariance between "
            f"{trainer.clip_cov_low:g} and {trainer.clip_cov_high:g}: {covariance}"
        )
    if trainer.kl_cov is not None:
        lines.append(
            f"c_t = 1 for the {trainer.kl_cov:g} of the batch's tokens with the largest covariance: {covariance}"
        )
    if trainer.reject_by is not None:
        measure = {
            "geometric": f"exp(mean log {mismatch})",
            "k1": f"mean of -log {mismatch}",
            "k2": f"mean of (log {mismatch})^2 / 2",
            "k3": f"mean of q - 1 - log q, q = {mismatch}",
        }[trainer.reject_by]
        lines.append(
            f"a_i = 0 for sequences whose {measure} is {_bounds(trainer.reject_low, trainer.reject_high)}; they still "
            "count in the normalizer"
        )
    return lines


def _kl(trainer: AlgorithmConfig) -> list[str]:
    """Returns the estimator of the KL in the loss, and the divergence whose gradient it has."""
    if trainer.kl_in == "reward":
        return []
    name = trainer.kl_estimator
    gradient = {
        "plain": f"its own, on fresh samples that of {_KL_OF_GRADIENT[name]}",
        "unbiased": "that of k2, on fresh samples that of KL(pi || reference)",
        "weighted": "its own times pi(t) / pi_behavior(t), on samples of any age that of "
        + ("the mean of k2 over pi" if name == "k2" else "KL(pi || reference)"),
    }[trainer.kl_gradient]
    return [f"{name}(pi || reference) = {_KL_VALUES[name]}; gradient: {gradient}"]
