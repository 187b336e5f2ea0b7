"""The published algorithms behind agentrl's presets, written out from their papers.

A new preset needs its entry here, with its numbers from its source and not from agentrl's declaration:
``test_presets.py`` fails without one.
"""

from tests.references.credit import generalised, group_relative, leave_one_out, nothing, plain_reward
from tests.references.losses import bounded_weight, clipped, soft_gate, trust_region, unbounded
from tests.references.step import Algorithm

GROUP, CENTERED = group_relative("group"), group_relative("none")
PPO_CLIP = clipped(0.2, 0.2)

PRESETS: dict[str, Algorithm] = {
    "grpo": Algorithm(GROUP, PPO_CLIP, "sequence"),
    "dr_grpo": Algorithm(CENTERED, PPO_CLIP, "constant"),
    "dapo": Algorithm(GROUP, clipped(0.2, 0.28), "token", drop_cut=True, clip=(0.2, 0.28)),
    "gspo": Algorithm(GROUP, clipped(3e-4, 4e-4), "sequence", by_sequence=True, clip=(3e-4, 4e-4)),
    "rloo": Algorithm(leave_one_out, unbounded, "sum"),
    "reinforce": Algorithm(plain_reward, unbounded, "sum"),
    "reinforce_pp": Algorithm(plain_reward, PPO_CLIP, "token", whiten=True),
    "reinforce_pp_baseline": Algorithm(CENTERED, PPO_CLIP, "token", whiten=True),
    "lite_ppo": Algorithm(group_relative("batch"), PPO_CLIP, "token"),
    "cispo": Algorithm(GROUP, bounded_weight(4.0), "token", clip=(0.2, 4.0)),
    "sapo": Algorithm(GROUP, soft_gate(1.0, 1.05), "sequence"),
    "m2po": Algorithm(GROUP, unbounded, "token", second_moment=0.04),
    "maxrl": Algorithm(group_relative("mean"), PPO_CLIP, "token"),
    "ppo": Algorithm(generalised(1.0, 1.0), PPO_CLIP, "token", whiten=True, critic=True),
    "decoupled": Algorithm(
        GROUP, PPO_CLIP, "token", denominator="start", bound=lambda ratio: min(ratio, 5.0), updates=4
    ),
    "dppo": Algorithm(GROUP, trust_region(0.15), "token"),
    "icepop": Algorithm(GROUP, PPO_CLIP, "sequence", denominator="start", bound=lambda ratio: ratio, inside=(0.5, 5.0)),
    "clip_cov": Algorithm(GROUP, PPO_CLIP, "token", clip_cov=(2e-4, 1.0, 5.0)),
    "kl_cov": Algorithm(GROUP, unbounded, "token", kl_cov=(2e-3, 1.0)),
    "distill": Algorithm(nothing, unbounded, "token", distill=1.0),
}
