"""Recipe keys for training an adapter (LoRA) instead of all weights, and their contradictions with other settings.

Guarantees: a key that would have no effect, or that does not work with an adapter, is refused before anything starts,
with both keys named.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


# Presets are filled in before validation, on Python data, where pydantic's strict mode does not accept a list as tuple.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]


class AdapterConfig(Section):
    """Low-rank adapters, Hu et al. 2021, arXiv:2106.09685.

    There is no dropout, because with dropout the trained policy would differ from the behavior policy.
    """

    lora_rank: Positive | None = Field(
        default=None, description="Train adapters of this rank and freeze the weights (LoRA); null: train all weights."
    )
    lora_alpha: float = Field(default=32.0, gt=0, description="Adapters are multiplied by lora_alpha / lora_rank.")
    lora_targets: Names = Field(
        default=(),
        description="Linear layers that get an adapter, e.g. [q_proj, v_proj], in an image tower too; []: all of the "
        "text side but the head.",
    )
    lora_push: Literal["merged", "adapter"] = Field(
        default="merged",
        description="Weights to push: all weights with the adapters added, or only the adapters (embedded engine).",
    )


def contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions of an adapter, or of CPU offload, with other settings."""
    trainer = recipe.trainer
    if trainer.cpu_offload and recipe.launch.device == "cpu":
        yield "trainer.cpu_offload=true moves parameters off the GPU: with launch.device=cpu there is no GPU"
    if trainer.lora_rank is None:
        for name, field in AdapterConfig.model_fields.items():
            if getattr(trainer, name) != field.default:
                yield f"trainer.{name} does nothing without trainer.lora_rank"
        return
    if trainer.reference != "frozen":
        yield (
            f"trainer.reference={trainer.reference} changes during training, but with trainer.lora_rank the reference "
            "is the model without its adapters: use trainer.reference=frozen"
        )
    if trainer.lora_push == "merged":
        return
    if recipe.weights.transport == "broadcast":
        yield "trainer.lora_push=adapter sends a file: weights.transport=broadcast needs trainer.lora_push=merged"
