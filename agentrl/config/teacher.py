"""The recipe's teacher section for on-policy distillation, and its contradictions with other settings.

Guarantees: a teacher without distillation, or distillation without a teacher, is refused before anything starts, with
both keys named.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl.config.section import Positive, Section

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe


class TeacherConfig(Section):
    """Teacher model of on-policy distillation, for trainer.distill_coef > 0."""

    model: str | None = Field(
        default=None,
        description="Teacher model, in the form of model.name, with the policy's tokenizer; null: no teacher.",
    )
    engine: str = Field(default="embedded", description="Kind of the teacher's server, see inference.engine.")
    urls: tuple[str, ...] = Field(
        default=(), description="URLs of running servers of the teacher; by default its servers are started."
    )
    servers: Positive = 1
    python: str | None = Field(default=None, description="Interpreter of the teacher's servers, see inference.python.")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_running: Positive = Field(default=16, description="Sequences scored together in one server.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a server; all cores by default.")
    args: tuple[str | int | float, ...] = Field(default=(), description="The server's own flags, passed through.")


def as_teacher(recipe: "Recipe") -> "Recipe":
    """Returns the recipe for starting the teacher's servers: its ``inference`` section has the teacher's settings.

    The context is one token longer than the policy's, because a server needs room to sample after the scored text.
    """
    own = recipe.teacher
    changes = {name: getattr(own, name) for name in type(own).model_fields if name != "model"}
    changes["context_length"] = recipe.inference.context_length + 1
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update=changes)})


def teacher_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Yields contradictions between the teacher and other settings of a recipe that trains on episodes."""
    teacher, trainer = recipe.teacher, recipe.trainer
    coef = f"trainer.distill_coef={trainer.distill_coef:g}"
    if teacher.urls and teacher.model is None:
        yield "teacher.urls needs teacher.model too: its tokenizer is compared with the policy's"
    elif trainer.distill_coef > 0 and teacher.model is None:
        yield f"{coef} needs a teacher: set teacher.model=NAME, and teacher.urls=[URL] if its servers run already"
    elif trainer.distill_coef == 0 and teacher.model is not None:
        yield f"teacher.model={teacher.model} does nothing with {coef}"
    if trainer.advantage == "none" and recipe.rollout.skip_uniform_groups:
        yield "rollout.skip_uniform_groups drops groups by their rewards, which trainer.advantage=none ignores"
