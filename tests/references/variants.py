"""Choices that no preset makes, each with its reference: KL, entropy, corrections, turns, proximal policies."""

import math
from typing import Any

from tests.references.credit import (
    generalised,
    group_relative,
    leave_one_out,
    nothing,
    others_relative,
    plain_reward,
    returns_of_turns,
    reward_over_deviation,
)
from tests.references.losses import (
    Kl,
    bernoulli_region,
    bounded_weight,
    clipped,
    dual_clipped,
    k1,
    k2,
    k3,
    soft_gate,
    unbounded,
)
from tests.references.presets import CENTERED, GROUP, PPO_CLIP
from tests.references.step import Algorithm

Variant = tuple[dict[str, Any], Algorithm]

VARIANTS: dict[str, Variant] = {
    "k3": (
        {"kl_coef": 0.3, "kl_gradient": "plain"}, Algorithm(GROUP, PPO_CLIP, "sequence", kl=Kl(0.3, k3, "plain")),
    ),
    "k1 with the gradient of k2": (
        {"kl_coef": 0.3, "kl_estimator": "k1", "kl_gradient": "unbiased", "aggregation": "token"},
        Algorithm(GROUP, PPO_CLIP, "token", kl=Kl(0.3, k1, "unbiased")),
    ),
    "k2 times the ratio": (
        {"kl_coef": 0.3, "kl_estimator": "k2", "kl_gradient": "weighted"},
        Algorithm(GROUP, PPO_CLIP, "sequence", kl=Kl(0.3, k2, "weighted")),
    ),
    "k3 times the ratio": (
        {"kl_coef": 0.3, "kl_gradient": "weighted", "aggregation": "sum"},
        Algorithm(GROUP, PPO_CLIP, "sum", kl=Kl(0.3, k3, "weighted")),
    ),
    "kl in the reward": (
        {"kl_coef": 0.05, "kl_in": "reward", "scale_rewards": "none"},
        Algorithm(CENTERED, PPO_CLIP, "sequence", kl_reward=0.05),
    ),
    "entropy": ({"entropy_coef": 0.2}, Algorithm(GROUP, PPO_CLIP, "sequence", entropy=0.2)),
    "entropy and kl of masked tokens": (
        {"preset": "m2po", "entropy_coef": 0.2, "kl_coef": 0.1, "kl_gradient": "plain"},
        Algorithm(GROUP, unbounded, "token", second_moment=0.04, entropy=0.2, kl=Kl(0.1, k3, "plain")),
    ),
    "dual clip": (
        {"objective": "dual_clip", "dual_clip": 1.2, "aggregation": "token"},
        Algorithm(GROUP, dual_clipped(0.2, 0.2, 1.2), "token"),
    ),
    "soft gate": (
        {"preset": "sapo", "sapo_temperature": 2.0, "sapo_temperature_negative": 5.0},
        Algorithm(GROUP, soft_gate(2.0, 5.0), "sequence"),
    ),
    "bounded weight": ({"preset": "cispo", "clip_eps_high": 0.2}, Algorithm(GROUP, bounded_weight(0.2), "token")),
    "unequal clip": (
        {"clip_eps": 0.1, "clip_eps_high": 0.5, "aggregation": "constant"},
        Algorithm(GROUP, clipped(0.1, 0.5), "constant", clip=(0.1, 0.5)),
    ),
    "mask above a cap": (
        {"proximal": "recomputed", "correction": "mask", "correction_cap": 1.3},
        Algorithm(GROUP, PPO_CLIP, "sequence", denominator="start", bound=lambda ratio: ratio * (ratio <= 1.3)),
    ),
    "truncated at a cap": (
        {"proximal": "recomputed", "correction": "truncate", "correction_cap": 1.3},
        Algorithm(GROUP, PPO_CLIP, "sequence", denominator="start", bound=lambda ratio: min(ratio, 1.3)),
    ),
    "correction of the sequence": (
        {"proximal": "recomputed", "correction": "truncate", "correction_cap": 2.0, "correction_level": "sequence"},
        Algorithm(
            GROUP, PPO_CLIP, "sequence", denominator="start", bound=lambda ratio: min(ratio, 2.0),
            bound_by_sequence=True,
        ),
    ),
    "log-linear": (
        {"proximal": "log_linear", "correction": "weight", "objective": "policy_gradient"},
        Algorithm(GROUP, unbounded, "sequence", denominator="log_linear", bound=lambda ratio: ratio),
    ),
    "ratio of the sequence without a bound": (
        {"ratio": "sequence", "objective": "policy_gradient", "aggregation": "token"},
        Algorithm(GROUP, unbounded, "token", by_sequence=True),
    ),
    "two updates": (
        {"minibatches": 2, "aggregation": "token"}, Algorithm(GROUP, PPO_CLIP, "token", updates=2),
    ),
    "turns": (
        {"advantage": "turns", "discount": 0.7}, Algorithm(returns_of_turns(0.7, "group"), PPO_CLIP, "sequence"),
    ),
    "turns, centered": (
        {"advantage": "turns", "scale_rewards": "none"},
        Algorithm(returns_of_turns(1.0, "none"), PPO_CLIP, "sequence"),
    ),
    "gae": (
        {"preset": "ppo", "discount": 0.9, "gae_lambda": 0.8, "whiten": "none"},
        Algorithm(generalised(0.9, 0.8), PPO_CLIP, "token", critic=True),
    ),
    "critic without a bound": (
        {"preset": "ppo", "critic_clip": None, "gae_lambda": 0.5, "minibatches": 2},
        Algorithm(generalised(1.0, 0.5), PPO_CLIP, "token", whiten=True, critic=True, value_clip=None, updates=2),
    ),
    "critic held near": (
        {"preset": "ppo", "critic_clip": 0.02, "minibatches": 2},
        Algorithm(generalised(1.0, 1.0), PPO_CLIP, "token", whiten=True, critic=True, value_clip=0.02, updates=2),
    ),
    "leave one out, whitened": (
        {"preset": "rloo", "whiten": "batch"}, Algorithm(leave_one_out, unbounded, "sum", whiten=True),
    ),
    "reward over the batch's deviation": (
        {"preset": "reinforce", "scale_rewards": "batch"}, Algorithm(reward_over_deviation, unbounded, "sum"),
    ),
    "reward and teacher": (
        {"scale_rewards": "none", "distill_coef": 0.5}, Algorithm(CENTERED, PPO_CLIP, "sequence", distill=0.5),
    ),
    "teacher, whitened": (
        {"preset": "distill", "whiten": "batch"},
        Algorithm(nothing, unbounded, "token", distill=1.0, whiten=True),
    ),
    "sequences rejected by their geometric mean": (
        {"reject_by": "geometric", "reject_low": 0.9, "reject_high": 1.1, "entropy_coef": 0.1, "kl_coef": 0.3},
        Algorithm(
            GROUP, PPO_CLIP, "sequence", reject=("geometric", 0.9, 1.1), entropy=0.1, kl=Kl(0.3, k3, "plain"),
        ),
    ),
    "sequences rejected by k1": (
        {"reject_by": "k1", "reject_low": -0.1, "reject_high": 0.05, "aggregation": "token"},
        Algorithm(GROUP, PPO_CLIP, "token", reject=("k1", -0.1, 0.05)),
    ),
    "sequences rejected by k2, later ones by the first update": (
        {"reject_by": "k2", "reject_high": 0.1, "minibatches": 2, "aggregation": "token"},
        Algorithm(GROUP, PPO_CLIP, "token", reject=("k2", None, 0.1), updates=2),
    ),
    "sequences rejected by k3 before the first update": (
        {"reject_by": "k3", "reject_high": 0.1, "proximal": "recomputed", "minibatches": 2, "aggregation": "sum"},
        Algorithm(GROUP, PPO_CLIP, "sum", denominator="start", reject=("k3", None, 0.1), updates=2),
    ),
    "tokens masked by the current policy": (
        {"token_mask_low": 0.8, "token_mask_high": 1.2, "minibatches": 2, "aggregation": "token"},
        Algorithm(GROUP, PPO_CLIP, "token", inside=(0.8, 1.2), updates=2),
    ),
    "tokens masked from below": (
        {"token_mask_low": 0.9, "proximal": "log_linear", "minibatches": 2},
        Algorithm(GROUP, PPO_CLIP, "sequence", denominator="log_linear", inside=(0.9, math.inf), updates=2),
    ),
    "dppo by kl": (
        {"preset": "dppo", "dppo_divergence": "kl", "dppo_threshold": 0.01},
        Algorithm(GROUP, bernoulli_region(0.01), "token"),
    ),
    "kl of tokens, gae": (
        {"preset": "ppo", "kl_coef": 0.05, "kl_in": "reward", "discount": 0.9, "gae_lambda": 0.8},
        Algorithm(generalised(0.9, 0.8), PPO_CLIP, "token", whiten=True, critic=True, kl_tokens=0.05),
    ),
    "kl of tokens, gae, not whitened": (
        {"preset": "ppo", "kl_coef": 0.05, "kl_in": "reward", "whiten": "none"},
        Algorithm(generalised(1.0, 1.0), PPO_CLIP, "token", critic=True, kl_tokens=0.05),
    ),
    "kl of tokens, turns": (
        {"advantage": "turns", "discount": 0.7, "kl_coef": 0.05, "kl_in": "reward"},
        Algorithm(returns_of_turns(0.7, "group"), PPO_CLIP, "sequence", kl_tokens=0.05),
    ),
    "kl of tokens, turns, over the batch's deviation": (
        {"advantage": "turns", "scale_rewards": "batch", "kl_coef": 0.05, "kl_in": "reward", "whiten": "batch"},
        Algorithm(returns_of_turns(1.0, "batch"), PPO_CLIP, "sequence", kl_tokens=0.05, whiten=True),
    ),
    "kl of tokens, reward": (
        {"preset": "reinforce_pp", "kl_coef": 0.05, "kl_in": "reward"},
        Algorithm(plain_reward, PPO_CLIP, "token", whiten=True, kl_tokens=0.05),
    ),
    "kl of tokens, reward over the batch's deviation": (
        {"preset": "reinforce", "scale_rewards": "batch", "kl_coef": 0.05, "kl_in": "reward"},
        Algorithm(reward_over_deviation, unbounded, "sum", kl_tokens=0.05),
    ),
    "compared with all roles": (
        {"baseline": "group"}, Algorithm(GROUP, PPO_CLIP, "sequence", baseline="group"),
    ),
    "compared with a tag": (
        {"baseline": "tag", "scale_rewards": "batch"},
        Algorithm(group_relative("batch"), PPO_CLIP, "sequence", baseline="tag"),
    ),
    "turns compared with all roles": (
        {"advantage": "turns", "baseline": "group", "scale_rewards": "none"},
        Algorithm(returns_of_turns(1.0, "none"), PPO_CLIP, "sequence", baseline="group"),
    ),
    "turns compared with a tag": (
        {"advantage": "turns", "baseline": "tag", "kl_coef": 0.05, "kl_in": "reward"},
        Algorithm(returns_of_turns(1.0, "group"), PPO_CLIP, "sequence", baseline="tag", kl_tokens=0.05),
    ),
    "one of a tag left out": (
        {"preset": "rloo", "baseline": "tag", "scale_rewards": "group"},
        Algorithm(others_relative("group"), unbounded, "sum", baseline="tag"),
    ),
    "one of all roles left out": (
        {"preset": "rloo", "baseline": "group", "scale_rewards": "batch"},
        Algorithm(others_relative("batch"), unbounded, "sum", baseline="group"),
    ),
    "means of a tag": (
        {"preset": "maxrl", "baseline": "tag"},
        Algorithm(group_relative("mean"), PPO_CLIP, "token", baseline="tag"),
    ),
    "means, cut ones left out": (
        {"preset": "maxrl", "mask_truncated": True, "aggregation": "sum"},
        Algorithm(group_relative("mean"), PPO_CLIP, "sum", drop_cut=True),
    ),
    "rewards whitened, cut ones left out": (
        {"preset": "reinforce_pp", "mask_truncated": True},
        Algorithm(plain_reward, PPO_CLIP, "token", whiten=True, drop_cut=True),
    ),
}  # fmt: skip

# Those whose terms need a whole sequence, a whole episode or a whole group.
ON_RANKS = (
    "sequences rejected by their geometric mean",
    "sequences rejected by k2, later ones by the first update",
    "sequences rejected by k3 before the first update",
    "correction of the sequence",
    "log-linear",
    "kl of tokens, gae",
    "kl of tokens, turns, over the batch's deviation",
    "kl of tokens, reward over the batch's deviation",
    "compared with a tag",
)
