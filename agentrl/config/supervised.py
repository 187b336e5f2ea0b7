"""The recipe's section for SFT, reward models and DPO, and its contradictions with other settings.

Guarantees: a key that such a trainer does not read is refused before anything starts, with both keys named.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agentrl.config.adapter import AdapterConfig
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.mesh import MeshConfig
from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe

SUPERVISED = ("sft", "rm", "dpo")
"""Values of trainer.type that train on examples instead of episodes: TRL's SFT, reward and DPO trainers."""

NO_ENV = "none"
"""Value of env.id without an environment; the dataset's lines must then hold the texts."""

_FOR_EPISODES: dict[str, tuple[str, ...]] = {
    "rollout": (
        "batch_size", "group_size", "group_extra", "on_failure", "retries", "min_group", "max_staleness", "stale",
        "max_stale_groups", "max_failure_rate", "max_failed_groups", "max_failures_in_a_row", "on_timeout",
        "skip_uniform_groups", "max_uniform_groups", "solved_reward", "curriculum", "workers", "nodes",
    ),
    "reward": ("scale", "bias", "clip"),
    "teacher": ("model", "urls"),
    "weights": ("transport", "pause_mode", "lease_seconds", "names"),
    "trainer": (
        *AlgorithmConfig.model_fields, *AdapterConfig.model_fields, *MeshConfig.model_fields, "logprob_chunk",
        "metric_share", "compile", "cpu_offload", "max_first_mismatch", "max_nonfinite", "batch_timeout", "attention",
        "freeze", "replay_routing",
    ),
}  # fmt: skip
_FOR_ONE: dict[str, str] = {"beta": "dpo", "loss_type": "dpo", "completion_only": "sft"}


class SupervisedConfig(Section):
    """For trainer.type=sft, rm and dpo, which train on the examples of a dataset."""

    batch_size: Positive = Field(default=8, description="Examples per trainer step, over all ranks.")
    max_length: Positive = Field(
        default=1024,
        description="Longest example in tokens, prompt and completion; longer ones are left out and counted.",
    )
    completion_only: bool = Field(
        default=True, description="sft: train only on the completion with its end of turn; false: also on the prompt."
    )
    beta: float = Field(default=0.1, gt=0, description="dpo: coefficient beta of the KL to the starting policy.")
    loss_type: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "apo_zero", "apo_down"] = Field(
        default="sigmoid", description="dpo: loss, by TRL's name."
    )
    evaluate: bool = Field(
        default=True, description="sft, dpo: run the environment's held-out tasks before and after, as grpo does."
    )


def contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between this section and other settings."""
    kind, own = recipe.trainer.type, recipe.supervised
    if kind not in SUPERVISED:
        if kind is not None and recipe.env.id == NO_ENV:
            yield f"env.id is missing: trainer.type={kind} learns by acting in an environment"
        if kind is None and recipe.env.id == NO_ENV:
            yield "env.id is missing: trainer.type=null evaluates in an environment"
        if kind == "grpo":
            for name in _changed(own, tuple(SupervisedConfig.model_fields)):
                yield f"supervised.{name} does nothing with trainer.type=grpo: it is for {', '.join(SUPERVISED)}"
        return
    if recipe.env.id == NO_ENV and recipe.train_dataset.name == "env" and recipe.train_dataset.path is None:
        yield f"trainer.type={kind} has no examples: set train_dataset.name, train_dataset.path or env.id"
    for section, names in _FOR_EPISODES.items():
        for name in _changed(getattr(recipe, section), names):
            yield f"{section}.{name} does nothing with trainer.type={kind}, which learns from examples"
    if kind == "rm" and recipe.trainer.router_aux_loss:
        yield "trainer.router_aux_loss does nothing with trainer.type=rm"
    for name in _changed(own, tuple(_FOR_ONE)):
        if _FOR_ONE[name] != kind:
            yield f"supervised.{name} does nothing with trainer.type={kind}: it is for trainer.type={_FOR_ONE[name]}"
    if own.batch_size % recipe.trainer.ranks:
        ranks = f"trainer.nproc={recipe.trainer.nproc}"
        ranks += f" * trainer.nodes={recipe.trainer.nodes}" * (recipe.trainer.nodes > 1)
        yield f"supervised.batch_size={own.batch_size} is not a multiple of {ranks}"
    if evaluates(recipe) and recipe.inference.urls:
        yield (
            f"inference.urls: trainer.type={kind} evaluates the trained model on a server that it starts itself; "
            "remove inference.urls, or set supervised.evaluate=false"
        )


def evaluates(recipe: "Recipe") -> bool:
    """Returns whether the environment's held-out tasks are evaluated before and after such a training."""
    return recipe.supervised.evaluate and recipe.trainer.type in ("sft", "dpo") and recipe.env.id != NO_ENV


def objective(recipe: "Recipe") -> list[str]:
    """Returns the formula of the minimised loss, as lines."""
    own, kind = recipe.supervised, recipe.trainer.type
    if kind == "sft":
        over = "of the completions and their ends of turn" if own.completion_only else "of the lines"
        return [f"loss = -1 / (tokens) * sum_t log pi(t), over all tokens {over} in the batch"]
    if kind == "rm":
        return ["loss = -1 / (pairs) * sum log sigmoid(score(chosen) - score(rejected)), the score of the last token"]
    formulas = {
        "sigmoid": "-log sigmoid(beta * (d(chosen) - d(rejected)))",
        "sigmoid_norm": "-log sigmoid(beta * (d(chosen) / |chosen| - d(rejected) / |rejected|))",
        "hinge": "max(0, 1 - beta * (d(chosen) - d(rejected)))",
        "ipo": "(d(chosen) / |chosen| - d(rejected) / |rejected| - 1 / (2 beta))^2",
        "apo_zero": "1 - sigmoid(beta * d(chosen)) + sigmoid(beta * d(rejected))",
        "apo_down": "sigmoid(beta * d(chosen)) + 1 - sigmoid(beta * (d(chosen) - d(rejected)))",
    }
    return [
        f"loss = 1 / (pairs) * sum {formulas[own.loss_type]}, beta = {own.beta:g}",
        "d(answer) = log pi(answer) - log reference(answer), |answer| its tokens; the reference is the starting model",
    ]


def _changed(section: Section, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the names whose values differ from the section's defaults."""
    fresh: Any = type(section)()
    return (name for name in names if getattr(section, name) != getattr(fresh, name))
