"""Training an adapter (LoRA) instead of all weights, and what that cannot be combined with.

Guarantees: a key that would do nothing, or that the adapter's reference or servers cannot follow, is refused with both
keys named, before anything starts.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


# A preset is filled in first: what was JSON's list is Python's by then, and no tuple to pydantic any more.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)]


class AdapterConfig(Section):
    """Low-rank adapters, Hu et al. 2021, arXiv:2106.09685.

    There is no dropout: what is trained would not be the policy that sampled.
    """

    lora_rank: Positive | None = Field(
        default=None, description="Train adapters of this rank and leave the weights alone (LoRA); null: all weights."
    )
    lora_alpha: float = Field(default=32.0, gt=0, description="Adapters are scaled by lora_alpha / lora_rank.")
    lora_targets: Names = Field(
        default=(),
        description="Linear layers that get an adapter, e.g. [q_proj, v_proj]; [] for all but the head.",
    )
    lora_push: Literal["merged", "adapter"] = Field(
        default="merged",
        description="Weights to push: all, with the adapters added, or the adapters alone (embedded engine).",
    )


def contradictions(recipe: "Recipe") -> Iterator[str]:
    """Contradictions of training an adapter, or of CPU offload, with other settings."""
    trainer = recipe.trainer
    if trainer.cpu_offload and recipe.launch.device == "cpu":
        yield "trainer.cpu_offload=true keeps what is not in use off the GPU: with launch.device=cpu there is none"
    if trainer.lora_rank is None:
        for name, field in AdapterConfig.model_fields.items():
            if getattr(trainer, name) != field.default:
                yield f"trainer.{name} does nothing without trainer.lora_rank"
        return
    if trainer.reference != "frozen":
        yield (
            f"trainer.reference={trainer.reference} moves, and with trainer.lora_rank the reference is the model "
            "without its adapters: use trainer.reference=frozen"
        )
    if trainer.lora_push == "merged":
        return
    if recipe.weights.transport == "broadcast":
        yield "trainer.lora_push=adapter travels in a file: weights.transport=broadcast needs trainer.lora_push=merged"
