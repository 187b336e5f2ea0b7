"""The objective as orthogonal choices, and the published algorithms as presets over them.

Guarantees: a preset only fills in what is not set; every choice can be changed by itself; choices that contradict each
other are refused with both keys named, before anything starts.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.declarations import find_preset
from agentrl.config.section import Positive, Section
from agentrl.core.registry import registered

RewardScale = Literal["group", "batch", "mean", "none"]
Level = Literal["token", "sequence"]


class AlgorithmConfig(Section):
    """What is optimised. A preset fills in what is not set."""

    preset: str = Field(
        default="grpo", description="A published combination of the choices below, or the path of your own."
    )
    advantage: str = Field(
        default="group",
        description="group, leave_one_out, reward, turns (returns of each turn, relative to the group's), gae (with a "
        "critic: PPO), none (of the reward: the teacher's say alone), or a path: the function that gives advantages.",
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="What later rewards count: a turn later (turns), a token later (gae)."
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="How far gae looks beyond the critic's next value.")
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    critic_clip: float | None = Field(
        default=0.2, gt=0, description="A value counts as at most this far from what it was; null: no bound."
    )
    critic_warmup: int = Field(default=0, ge=0, description="First steps, in which the critic alone learns.")
    scale_rewards: RewardScale = Field(
        default="group",
        description="Divide centered rewards by the standard deviation of the group or the batch, by the group's mean "
        "(MaxRL), or by nothing (none).",
    )
    whiten: Literal["none", "batch"] = Field(
        default="none", description="Bring the advantages of all tokens of the global batch to mean 0 and deviation 1."
    )
    objective: str = Field(
        default="clip", description="clip, dual_clip, cispo, sapo, policy_gradient, or a path: the loss per token."
    )
    ratio: Level = Field(
        default="token", description="Probability ratio of a token, or the mean of its sequence (GSPO)."
    )
    proximal: Literal["behavior", "recomputed", "log_linear"] = Field(
        default="behavior",
        description="What the ratio is taken to: the policy that sampled, the one that the step starts from (one more "
        "forward pass), or a guess at that one from the tokens' versions.",
    )
    minibatches: Positive = Field(
        default=1, description="Optimizer updates per batch, each over a share of its groups."
    )
    clip_eps: float = Field(default=0.2, gt=0, lt=1)
    clip_eps_high: float | None = Field(default=None, gt=0, description="Upper clip range; clip_eps where null.")
    dual_clip: float = Field(default=3.0, gt=1, description="Largest ratio that counts for a negative advantage.")
    sapo_temperature: float = Field(default=1.0, gt=0, description="How soft SAPO's gate is for positive advantages.")
    sapo_temperature_negative: float = Field(default=1.05, gt=0, description="The same for negative ones.")
    m2_threshold: float | None = Field(
        default=None, gt=0, description="Leave out the tokens that drive the mean squared log ratio above this (M2PO)."
    )
    correction: Literal["none", "weight", "truncate", "mask"] = Field(
        default="none",
        description="Weigh tokens by the proximal over the behavior probability: as it is, at most correction_cap, or "
        "not at all above it.",
    )
    correction_level: Level = Field(default="token", description="Weight of a token, or the product over its sequence.")
    correction_cap: float = Field(default=2.0, ge=1)
    aggregation: Literal["token", "sequence", "constant", "sum"] = Field(
        default="sequence",
        description="Mean over all tokens, mean over sequences of their means, or sum over tokens and mean over "
        "sequences, divided by a constant (aggregation_length) or not.",
    )
    aggregation_length: Positive | None = Field(
        default=None, description="For aggregation=constant; sampling.max_new_tokens where null."
    )
    mask_truncated: bool = Field(default=False, description="Do not train on episodes that were cut off (DAPO).")
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to a reference policy; 0: no reference model."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_gradient: Literal["unbiased", "weighted", "plain"] = Field(
        default="unbiased",
        description="Gradient of the KL itself on fresh samples (k2's), of the estimator weighed by the ratio "
        "(unbiased for older samples too, but noisier), or of the estimator.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="A term of the loss, or taken off the reward before the advantage (k1 of the answer).",
    )
    reference: Literal["frozen", "ema", "reset"] = Field(
        default="frozen", description="The starting policy, a moving average of the policy, or its copy now and then."
    )
    reference_decay: float = Field(default=0.99, gt=0, lt=1, description="For reference=ema: what stays at a step.")
    reference_every: Positive = Field(default=100, description="For reference=reset: steps between copies.")
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus, per token; keeps answers varied."
    )
    distill_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the teacher's say in each token's advantage: log teacher - log behavior policy.",
    )

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, data: Any) -> Any:
        """Defaults of the preset, below what is set."""
        if not isinstance(data, dict):
            return data
        try:
            return find_preset(str(data.get("preset", "grpo"))).settings | data
        except LookupError as error:
            raise ValueError(f"trainer.preset: {error}") from None

    @model_validator(mode="after")
    def check_algorithm(self) -> Self:
        """Refuse choices that contradict each other."""
        given = self.model_fields_set
        if self.correction != "none" and self.proximal == "behavior":
            raise ValueError(
                f"trainer.correction={self.correction} weighs by the proximal over the behavior policy, and with "
                "trainer.proximal=behavior they are the same: it could not act; use proximal=recomputed or log_linear"
            )
        if self.m2_threshold is not None and self.proximal == "log_linear":
            raise ValueError(
                "trainer.m2_threshold needs real log ratios: trainer.proximal=log_linear only guesses them"
            )
        if self.ratio == "sequence" and self.objective == "cispo":
            raise ValueError("trainer.objective=cispo weighs each token's own logprob: trainer.ratio must be token")
        if self.kl_coef == 0:
            for key in ("kl_in", "reference"):
                if key in given and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"trainer.{key}={getattr(self, key)} does nothing with trainer.kl_coef=0")
        if self.kl_in == "reward" and self.advantage == "reward" and self.scale_rewards == "mean":
            raise ValueError(
                "trainer.scale_rewards=mean needs rewards of at least 0, and trainer.kl_in=reward lowers them"
            )
        for problem in self._idle(given):
            raise ValueError(problem)
        if self.advantage == "gae" and self.scale_rewards != "none":
            raise ValueError(
                f"trainer.advantage=gae has no groups: trainer.scale_rewards={self.scale_rewards} cannot act; use none "
                "(whiten=batch brings all advantages to one scale)"
            )
        if self.advantage == "reward" and self.scale_rewards in ("group", "mean"):
            raise ValueError(
                f"trainer.advantage=reward has no groups: trainer.scale_rewards={self.scale_rewards} cannot act; "
                "use none or batch"
            )
        for problem in self._distilled():
            raise ValueError(problem)
        if self.advantage == "leave_one_out" and self.scale_rewards == "mean":
            raise ValueError("trainer.advantage=leave_one_out: trainer.scale_rewards=mean divides by another baseline")
        return self

    def _distilled(self) -> Iterator[str]:
        """What contradicts a teacher, or the lack of any reward."""
        if self.distill_coef > 0 and self.ratio == "sequence":
            yield (
                f"trainer.distill_coef={self.distill_coef:g} gives each token its own advantage, which "
                "trainer.ratio=sequence averages over the sequence: it must be token"
            )
        if self.advantage != "none":
            return
        if self.distill_coef == 0:
            yield "trainer.advantage=none leaves nothing to learn with trainer.distill_coef=0"
        if self.scale_rewards != "none":
            yield (
                f"trainer.advantage=none looks at no reward: trainer.scale_rewards={self.scale_rewards} cannot act; "
                "use none"
            )
        if self.kl_coef > 0 and self.kl_in == "reward":
            yield "trainer.advantage=none looks at no reward: trainer.kl_in=reward cannot act; use loss"

    def _idle(self, given: set[str]) -> Iterator[str]:
        """What was set and cannot act with this advantage."""
        for keys, advantages in (
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
