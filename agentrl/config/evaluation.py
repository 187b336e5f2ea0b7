"""Settings of evaluations."""

from typing import Literal

from pydantic import Field

from agentrl.config.section import Positive, Section


class EvalConfig(Section):
    """Evaluation on the validation tasks."""

    every: int = Field(default=10, ge=0, description="Trainer steps between evaluations; 0: only before and after.")
    tasks: Positive | None = Field(default=128, description="Number of validation tasks; null: all.")
    samples: Positive = Field(default=1, description="Episodes per task.")
    on_push: Literal["wait", "mix", "reserve"] = Field(
        default="wait",
        description="New weights during an evaluation: they wait for its end; or its episodes go on with them (mix: "
        "eval/version_min and _max say which they saw); or a quarter of the servers, at least one of two, keep the "
        "evaluated version for it. The final evaluation is always of one version.",
    )
    until_ci: float | None = Field(
        default=None,
        gt=0,
        lt=0.5,
        description="Half width of the accuracy's 95% interval at which no further task begins; that interval holds "
        "however often it is looked at. Only of an evaluation without a trainer, as the next three.",
    )
    max_cost: float | None = Field(default=None, gt=0, description="Cost at which no further episode begins.")
    max_total_tokens: Positive | None = Field(
        default=None, description="Tokens, read and sampled together, at which no further episode begins."
    )
    price: dict[str, float] | None = Field(
        default=None,
        description="Price of a million tokens, {input: 2.5, output: 10}, and cached where it differs; null: the one "
        "of the model in ~/.config/agentrl/prices.yaml, if there is one.",
    )
