"""Writes the loss of a trainer section as a formula to compare with the papers; does not import torch."""

from agentrl.config.algorithm import COMPARING, AlgorithmConfig
from agentrl.config.baseline import BASELINE_FORMULAS
from agentrl.config.declarations import find_preset, formula_of
from agentrl.train.loss import AGGREGATION_FORMULAS, PROXIMAL_FORMULAS

_DIVISORS = {
    "group": " / std({} of the group)",
    "batch": " / std({} of the batch)",
    "mean": " / mean({} of the group)",
    "none": "",
}


def formula(trainer: AlgorithmConfig) -> list[str]:
    """Returns the lines that describe the minimised loss."""
    length = trainer.aggregation_length or "sampling.max_new_tokens"
    aggregation = AGGREGATION_FORMULAS[trainer.aggregation].format(length=length)
    factors = ""
    if trainer.m2_threshold is not None:
        factors += "m_t * "
    if trainer.correction != "none":
        factors += "w_t * "
    terms = f"{factors}{_surrogate(trainer)}"
    if trainer.kl_coef and trainer.kl_in == "loss":
        terms += f" + {trainer.kl_coef:g} * {trainer.kl_estimator}(pi || reference)"
    if trainer.entropy_coef:
        terms += f" - {trainer.entropy_coef:g} * H_t"
    lines = [f"loss = {aggregation} [{terms}]"]
    if trainer.ratio == "token":
        lines.append(f"r_t = pi(t) / {PROXIMAL_FORMULAS[trainer.proximal]}")
    else:
        lines.append(f"r_t = exp(mean over the sequence of log pi(t) - log {PROXIMAL_FORMULAS[trainer.proximal]})")
    lines.append(f"A = {_advantage(trainer)}")
    if trainer.advantage in COMPARING and BASELINE_FORMULAS[trainer.baseline]:
        lines.append(BASELINE_FORMULAS[trainer.baseline])
    lines += _along(trainer)
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
        text += f", R_i minus {trainer.kl_coef:g} * sum_t log pi_behavior(t) / reference(t)"
    if trainer.distill_coef:
        teacher = f"{trainer.distill_coef:g} * log(pi_behavior(t) / teacher(t))"
        text = f"-{teacher}" if trainer.advantage == "none" else f"{text}, minus {teacher}"
    if trainer.whiten == "batch":
        text += ", then whitened over the tokens of the batch"
    return text


def _along(trainer: AlgorithmConfig) -> list[str]:
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
    if trainer.mask_truncated:
        lines.append(
            "episodes that were cut (last answer at its length limit, truncated, or out of context) count only in "
            "their group's mean"
        )
    if trainer.kl_coef:
        kind = {
            "frozen": "the starting policy",
            "ema": f"a moving average of the policy with decay {trainer.reference_decay:g} per step",
            "reset": f"the policy, copied every {trainer.reference_every} steps",
        }[trainer.reference]
        lines.append(f"reference = {kind}")
    if trainer.distill_coef:
        lines.append("teacher = teacher.model at temperature 1, given the same tokens before t")
    return lines
