"""The objective of a trainer section as a formula that a person can check against the papers."""

from agentrl.config.algorithm import PRESET_SOURCES, AlgorithmConfig

_ADVANTAGES = {
    "group": "R_i - mean(R of the group)",
    "leave_one_out": "R_i - mean(R of the group's others)",
    "reward": "R_i",
    "turns": "G_k - mean(G over the turns of the group)",
    "gae": "sum_j (gamma lambda)^j delta_t+j",
    "none": "0",
}
_DIVISORS = {
    "group": " / std({} of the group)",
    "batch": " / std({} of the batch)",
    "mean": " / mean({} of the group)",
    "none": "",
}
_PROXIMAL = {
    "behavior": "pi_behavior(t)",
    "recomputed": "pi_proximal(t), the policy that the step starts from, computed anew",
    "log_linear": "pi_proximal(t), guessed between behavior and current policy by their versions",
}


def formula(trainer: AlgorithmConfig) -> list[str]:
    """Lines of the objective that is minimised."""
    length = trainer.aggregation_length or "sampling.max_new_tokens"
    aggregation = {
        "token": "1 / (tokens of the batch) * sum_t",
        "sequence": "1 / (sequences) * sum_i 1 / |i| * sum_t",
        "constant": f"1 / (sequences * {length}) * sum_t",
        "sum": "1 / (sequences) * sum_t",
    }[trainer.aggregation]
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
        lines.append(f"r_t = pi(t) / {_PROXIMAL[trainer.proximal]}")
    else:
        lines.append(f"r_t = exp(mean over the sequence of log pi(t) - log {_PROXIMAL[trainer.proximal]})")
    lines.append(f"A = {_advantage(trainer)}")
    lines += _along(trainer)
    lines += _weights(trainer)
    if trainer.minibatches > 1:
        lines.append(f"{trainer.minibatches} updates a batch, each over its share of the groups")
    source = PRESET_SOURCES[trainer.preset]
    return [*lines, f"preset {trainer.preset}: {source}"]


def _surrogate(trainer: AlgorithmConfig) -> str:
    low, high = 1 - trainer.clip_eps, 1 + (trainer.clip_eps_high or trainer.clip_eps)
    clip = f"max(-r_t A, -clamp(r_t, {low:g}, {high:g}) A)"
    positive, negative = trainer.sapo_temperature, trainer.sapo_temperature_negative
    known = {
        "clip": clip,
        "dual_clip": f"min({clip}, -{trainer.dual_clip:g} A where A < 0)",
        "cispo": f"-stop(min(r_t, {high:g})) A log pi(t)",
        "sapo": f"-4/T sigmoid(T (r_t - 1)) A, T = {positive:g} where A > 0, else {negative:g}",
        "policy_gradient": "-r_t A",
    }
    return known.get(trainer.objective, f"{trainer.objective}(pi(t), r_t, A)")


def _advantage(trainer: AlgorithmConfig) -> str:
    base = _ADVANTAGES.get(trainer.advantage)
    text = f"{trainer.advantage}(rewards)" if base is None else base
    if base is not None and _DIVISORS[trainer.scale_rewards]:
        text = f"({text}){_DIVISORS[trainer.scale_rewards].format('G' if trainer.advantage == 'turns' else 'R')}"
    if trainer.kl_coef and trainer.kl_in == "reward":
        text += f", R_i less {trainer.kl_coef:g} * sum_t log pi_behavior(t) / reference(t)"
    if trainer.distill_coef:
        teacher = f"{trainer.distill_coef:g} * log(pi_behavior(t) / teacher(t))"
        text = f"-{teacher}" if trainer.advantage == "none" else f"{text}, less {teacher}"
    if trainer.whiten == "batch":
        text += ", then whitened over the tokens of the batch"
    return text


def _along(trainer: AlgorithmConfig) -> list[str]:
    """Terms of an advantage of turns or tokens."""
    gamma = trainer.discount
    if trainer.advantage == "turns":
        return [f"G_k = reward of turn k + {gamma:g} * G of the turn after it on its branch"]
    if trainer.advantage != "gae":
        return []
    advantage = (
        "(the sum above)" if trainer.whiten == "batch" or trainer.distill_coef else "A"
    )  # as it was before those
    clip = "" if trainer.critic_clip is None else f", V within {trainer.critic_clip:g} of what it was"
    lines = [
        f"delta_t = reward at t + gamma V(t+1) - V(t), gamma = {gamma:g}, lambda = {trainer.gae_lambda:g}",
        f"critic: loss = mean over tokens of (V(t) - {advantage} - V_before(t))^2 / 2{clip}",
    ]
    if trainer.critic_warmup:
        lines.append(f"the critic alone learns in the first {trainer.critic_warmup} steps")
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
        lines.append("episodes that were cut off count in their group's mean only")
    if trainer.kl_coef:
        kind = {
            "frozen": "the starting policy",
            "ema": f"a moving average of the policy, {trainer.reference_decay:g} of which stays at a step",
            "reset": f"the policy, copied every {trainer.reference_every} steps",
        }[trainer.reference]
        lines.append(f"reference = {kind}")
    if trainer.distill_coef:
        lines.append("teacher = teacher.model at temperature 1, given the same tokens before t")
    return lines
