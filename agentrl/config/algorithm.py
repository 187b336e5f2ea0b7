"""The recipe's keys that define the loss: independent choices, and presets for published algorithms.

Guarantees: a preset sets only keys that are not set explicitly; every choice can be changed by itself; choices that
contradict each other are refused before anything starts, with both keys named.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.baseline import Baseline
from agentrl.config.declarations import find_preset
from agentrl.config.mask_problems import mask_problems
from agentrl.config.section import Positive, Section
from agentrl.core.registry import registered

RewardScale = Literal["group", "batch", "mean", "none"]
Level = Literal["token", "sequence"]
COMPARING = ("group", "leave_one_out", "turns")  # advantages that compare rewards with those of a baseline


class AlgorithmConfig(Section):
    """The loss. A preset sets the keys that are not set explicitly."""

    preset: str = Field(
        default="grpo", description="Published algorithm that sets the keys below, or the path of your own preset."
    )
    advantage: str = Field(
        default="group",
        description="Advantage function: group, leave_one_out, reward, turns (returns of each turn, relative to the "
        "group's), gae (with a critic: PPO), none (only the teacher, no reward), or a path.",
    )
    baseline: Baseline = Field(
        default="role",
        description="Rewards that a reward is compared with: those of the same role in the same group (role), of all "
        "roles of the group (group), or of the same role in the batch's tasks with the same text in their row's column "
        "tag (tag), which also allows rollout.group_size=1.",
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="Discount factor: per turn (advantage=turns), per token (gae)."
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="Lambda of generalised advantage estimation (GAE).")
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    critic_clip: float | None = Field(
        default=0.2, gt=0, description="Clip range of the critic's values around their old values; null: no clipping."
    )
    critic_warmup: int = Field(default=0, ge=0, description="First trainer steps, in which only the critic is updated.")
    scale_rewards: RewardScale = Field(
        default="group",
        description="Divisor of centered rewards: the standard deviation of the group or the batch, the group's mean "
        "(MaxRL), or none.",
    )
    whiten: Literal["none", "batch"] = Field(
        default="none",
        description="Normalise the advantages of all tokens of the global batch to mean 0 and standard deviation 1.",
    )
    objective: str = Field(
        default="clip", description="Loss per token: clip, dual_clip, cispo, sapo, dppo, policy_gradient, or a path."
    )
    ratio: Level = Field(
        default="token",
        description="Level of the importance ratio: per token, or the geometric mean of the sequence (GSPO).",
    )
    proximal: Literal["behavior", "recomputed", "log_linear"] = Field(
        default="behavior",
        description="Denominator of the importance ratio: the behavior policy, the policy that the step starts from "
        "(one more forward pass), or an estimate of it from the tokens' versions.",
    )
    minibatches: Positive = Field(
        default=1, description="Optimizer updates per batch, each over a share of its groups."
    )
    clip_eps: float = Field(default=0.2, gt=0, lt=1)
    clip_eps_high: float | None = Field(default=None, gt=0, description="Upper clip range; null: clip_eps.")
    dual_clip: float = Field(
        default=3.0, gt=1, description="Upper bound of the importance ratio for negative advantages."
    )
    sapo_temperature: float = Field(
        default=1.0, gt=0, description="Temperature of SAPO's gate for positive advantages."
    )
    sapo_temperature_negative: float = Field(
        default=1.05, gt=0, description="Temperature of SAPO's gate for negative advantages."
    )
    dppo_divergence: Literal["tv", "kl"] = Field(
        default="tv",
        description="Divergence of objective=dppo: total variation or KL of the sampled token against all others.",
    )
    dppo_threshold: float | None = Field(
        default=None, gt=0, description="Largest divergence of objective=dppo; null: 0.15 for tv, 0.05 for kl."
    )
    m2_threshold: float | None = Field(
        default=None, gt=0, description="Leave out the tokens that drive the mean squared log ratio above this (M2PO)."
    )
    correction: Literal["none", "weight", "truncate", "mask"] = Field(
        default="none",
        description="Multiply the loss by the probability ratio of proximal and behavior policy: as is (weight), at "
        "most correction_cap (truncate), or 0 above correction_cap (mask).",
    )
    correction_level: Level = Field(
        default="token", description="Level of the correction: ratio of a token, or the product over its sequence."
    )
    correction_cap: float = Field(default=2.0, ge=1)
    token_mask_low: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="No surrogate loss for tokens whose probability ratio of the trainer's policy (as the step starts "
        "with proximal=recomputed, else the current one) and the behavior policy is lower (IcePop).",
    )
    token_mask_high: float | None = Field(
        default=None, ge=1, description="No surrogate loss for tokens whose probability ratio is higher (IcePop)."
    )
    reject_by: Literal["geometric", "k1", "k2", "k3"] | None = Field(
        default=None,
        description="No loss for sequences whose geometric mean of that ratio, or mean of its k1 (-log), k2 "
        "(log^2 / 2) or k3 (ratio - 1 - log), is below reject_low or above reject_high; null: none.",
    )
    reject_low: float | None = Field(default=None, description="Lower bound for reject_by.")
    reject_high: float | None = Field(default=None, description="Upper bound for reject_by.")
    clip_cov: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the batch's tokens without surrogate loss, drawn from those whose covariance of logprob "
        "and advantage is between clip_cov_low and clip_cov_high (Clip-Cov).",
    )
    clip_cov_low: float = Field(default=1.0, description="Lower bound of the covariance for clip_cov.")
    clip_cov_high: float = Field(default=5.0, description="Upper bound of the covariance for clip_cov.")
    kl_cov: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the batch's tokens, those with the largest covariance of logprob and advantage, that are "
        "held near the denominator of the importance ratio (KL-Cov).",
    )
    kl_cov_coef: float = Field(default=1.0, gt=0, description="Coefficient of the penalty of kl_cov.")
    aggregation: Literal["token", "sequence", "constant", "sum"] = Field(
        default="sequence",
        description="Mean over all tokens (token), mean of the sequences' means (sequence), or mean of the sequences' "
        "sums, divided by aggregation_length (constant) or not (sum).",
    )
    aggregation_length: Positive | None = Field(
        default=None, description="Divisor for aggregation=constant; null: sampling.max_new_tokens."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Do not train on episodes that were cut (DAPO): last answer at its length limit, truncated, or out "
        "of context.",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Coefficient of the KL to a reference policy; 0: no reference model."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_gradient: Literal["unbiased", "weighted", "plain"] = Field(
        default="unbiased",
        description="Gradient of the KL on fresh samples (that of k2), of the estimator weighted by the importance "
        "ratio (unbiased for older samples too, but noisier), or the estimator's own (GRPO: that of k3 on fresh "
        "samples is the gradient of the KL from reference to policy).",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="Place of the KL: a term of the loss, or subtracted from the reward (k1): from each token's with "
        "advantage=gae, turns or reward, else from the episode's.",
    )
    reference: Literal["frozen", "ema", "reset"] = Field(
        default="frozen",
        description="Reference policy: the starting policy, a moving average, or a copy at intervals.",
    )
    reference_decay: float = Field(
        default=0.99, gt=0, lt=1, description="For reference=ema: decay of the moving average per step."
    )
    reference_every: Positive = Field(default=100, description="For reference=reset: steps between copies.")
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Coefficient of the entropy bonus, per token; keeps answers varied."
    )
    distill_coef: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of log teacher - log behavior policy in each token's advantage.",
    )

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, data: Any) -> Any:
        """Sets the preset's values for keys that are not set."""
        if not isinstance(data, dict):
            return data
        try:
            return find_preset(str(data.get("preset", "grpo"))).settings | data
        except LookupError as error:
            raise ValueError(f"trainer.preset: {error}") from None

    @model_validator(mode="after")
    def check_algorithm(self) -> Self:
        """Refuses choices that contradict each other."""
        given = self.model_fields_set
        if self.correction != "none" and self.proximal == "behavior":
            raise ValueError(
                f"trainer.correction={self.correction} has no effect with trainer.proximal=behavior: proximal and "
                "behavior policy are the same; use trainer.proximal=recomputed or log_linear"
            )
        if self.m2_threshold is not None and self.proximal == "log_linear":
            raise ValueError(
                "trainer.m2_threshold needs exact log ratios: trainer.proximal=log_linear only estimates them"
            )
        if self.ratio == "sequence" and self.objective == "cispo":
            raise ValueError("trainer.objective=cispo weights each token's logprob: trainer.ratio must be token")
        if self.kl_coef == 0:
            for key in ("kl_in", "reference"):
                if key in given and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"trainer.{key}={getattr(self, key)} does nothing with trainer.kl_coef=0")
        for problem in (*mask_problems(self, given), *self._idle(given)):
            raise ValueError(problem)
        if self.advantage == "gae" and self.scale_rewards != "none":
            raise ValueError(
                f"trainer.advantage=gae has no groups: trainer.scale_rewards={self.scale_rewards} has no effect; use "
                "none (trainer.whiten=batch brings all advantages to one scale)"
            )
        if self.advantage == "reward" and self.scale_rewards in ("group", "mean"):
            raise ValueError(
                f"trainer.advantage=reward has no groups: trainer.scale_rewards={self.scale_rewards} has no effect; "
                "use none or batch"
            )
        for problem in (*self._distilled(), *self._without_effect()):
            raise ValueError(problem)
        if self.advantage == "leave_one_out" and self.scale_rewards == "mean":
            raise ValueError(
                "trainer.advantage=leave_one_out cannot have trainer.scale_rewards=mean: the group's mean is not its "
                "baseline"
            )
        return self

    def _distilled(self) -> Iterator[str]:
        """Yields contradictions with a teacher or with ``advantage=none``."""
        if self.distill_coef > 0 and self.ratio == "sequence":
            yield (
                f"trainer.distill_coef={self.distill_coef:g} gives each token its own advantage, which "
                "trainer.ratio=sequence averages over the sequence: it must be token"
            )
        if self.advantage != "none":
            return
        if self.distill_coef == 0:
            yield "trainer.advantage=none gives no advantages with trainer.distill_coef=0"
        if self.scale_rewards != "none":
            yield (
                f"trainer.advantage=none ignores rewards: trainer.scale_rewards={self.scale_rewards} has no effect; "
                "use none"
            )
        if self.kl_coef > 0 and self.kl_in == "reward":
            yield "trainer.advantage=none ignores rewards: trainer.kl_in=reward has no effect; use loss"

    def _without_effect(self) -> Iterator[str]:
        """Yields keys of the KL that contradict others."""
        if self.kl_coef == 0:
            return
        if self.kl_in == "reward" and self.scale_rewards == "mean":
            yield "trainer.scale_rewards=mean needs rewards of at least 0, and trainer.kl_in=reward lowers them"
        if self.kl_in == "reward" and self.kl_estimator == "k2":
            yield "trainer.kl_estimator=k2 has no effect with trainer.kl_in=reward, which subtracts k1"
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_gradient == "plain":
            yield (
                "trainer.kl_estimator=k1 has no gradient in expectation with trainer.kl_gradient=plain: use "
                "kl_gradient=unbiased or weighted"
            )

    def _idle(self, given: set[str]) -> Iterator[str]:
        """Yields settings that have no effect with this advantage."""
        for keys, advantages in (
            (("baseline",), COMPARING),
            (("discount",), ("turns", "gae")),
            (("gae_lambda", "critic_learning_rate", "critic_clip", "critic_warmup"), ("gae",)),
        ):
            for key in keys:
                unlike = getattr(self, key) != type(self).model_fields[key].default
                if (
                    key in given
                    and unlike
                    and self.advantage in registered("advantage")
                    and self.advantage not in advantages
                ):
                    yield (
                        f"trainer.{key}={getattr(self, key)} does nothing with trainer.advantage={self.advantage}; it "
                        f"belongs to {' and '.join(advantages)}"
                    )
