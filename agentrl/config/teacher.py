"""On-policy distillation: the teacher, its servers, and what cannot work together with it.

Guarantees: a teacher that nothing asks, or a distillation without one, is refused with both keys named, before
anything starts.
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
        description="Teacher model, named as model.name is; it must have the policy's tokenizer. null: no teacher.",
    )
    engine: str = Field(default="embedded", description="Kind of server, as inference.engine.")
    urls: tuple[str, ...] = Field(
        default=(), description="Servers of the teacher that run already; by default one is started."
    )
    servers: Positive = 1
    python: str | None = Field(default=None, description="Interpreter of its servers, as inference.python.")
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_running: Positive = Field(default=16, description="Sequences scored together in one server.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a server; all cores by default.")
    args: tuple[str | int | float, ...] = Field(default=(), description="The server's own flags, passed through.")


def as_teacher(recipe: "Recipe") -> "Recipe":
    """The recipe as the start of the teacher's servers reads it: ``inference`` is theirs.

    Their context is one token longer than the policy's: a server wants room to sample after what it scores.
    """
    own = recipe.teacher
    changes = {name: getattr(own, name) for name in type(own).model_fields if name != "model"}
    changes["context_length"] = recipe.inference.context_length + 1
    return recipe.model_copy(update={"inference": recipe.inference.model_copy(update=changes)})


def teacher_contradictions(recipe: "Recipe") -> Iterator[str]:
    """Contradictions between the teacher and other settings of a recipe that trains on episodes."""
    teacher, trainer = recipe.teacher, recipe.trainer
    coef = f"trainer.distill_coef={trainer.distill_coef:g}"
    if teacher.urls and teacher.model is None:
        yield "teacher.urls needs teacher.model, too: its tokenizer is compared with the policy's"
    elif trainer.distill_coef > 0 and teacher.model is None:
        yield f"{coef} needs a teacher: set teacher.model=NAME, and teacher.urls=[URL] where it is served already"
    elif trainer.distill_coef == 0 and teacher.model is not None:
        yield f"teacher.model={teacher.model} does nothing with {coef}"
    if trainer.advantage == "none" and recipe.rollout.skip_uniform_groups:
        yield "rollout.skip_uniform_groups drops groups by their rewards, which trainer.advantage=none does not look at"
