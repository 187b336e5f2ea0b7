"""The way in which a model computes a batch of sequences: as prefix trees, as packed rows, or one sequence a row.

Guarantees: plain data; a way is found by :mod:`agentrl.models.probe` and kept on the model's decoder, so that policy,
critic and layouts read the same one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.models.decoder import decoder_of
from agentrl.models.own_head import HeadForm
from agentrl.models.tree_mask import Reach

Rows = Literal["trees", "packed", "padded"]
COSTS = {
    "trees": "common beginnings are computed once",
    "packed": "sequences lie end to end in a row; a group's prompt is computed once for each of its sequences",
    "padded": "one sequence a row; a group's prompt is computed once for each of its sequences, and rows are padded",
}


@dataclass(frozen=True)
class Way:
    """How a model computes several sequences.

    Attributes:
        rows: ``trees``: common beginnings are computed once; ``packed``: sequences end to end in one row; ``padded``:
            one sequence a row.
        reaches: For trees, the reach of each kind of layer by the name that the model's masks have; empty for one
            mask of unlimited reach, and with the name ``""`` for one limited mask.
        added: For trees, whether the model adds its mask to the scores, instead of choosing by it.
        why: Why the model is not computed in a faster way; empty for trees.
    """

    rows: Rows = "trees"
    reaches: dict[str, Reach] = field(default_factory=dict)
    added: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"{self.rows} ({COSTS[self.rows]})" + (f", because {self.why}" if self.why else "")


@dataclass(frozen=True)
class ModelForm:
    """Form of a model, found by trying it.

    Attributes:
        way: How it computes several sequences.
        head: Form of its output head.
        head_parameters: Names of the head's parameters, for a head of its own form.
    """

    way: Way = field(default_factory=Way)
    head: HeadForm = field(default_factory=HeadForm)
    head_parameters: tuple[str, ...] = ()


def form_of(model: Any) -> ModelForm:
    """Returns the form that :func:`set_form` kept; that of a plain Llama if there is none.

    Args:
        model: A causal language model, or its decoder.
    """
    return getattr(decoder_of(model), "agentrl_form", None) or ModelForm()


def set_form(model: Any, form: ModelForm) -> None:
    """Keeps the form of a model on its decoder."""
    decoder_of(model).agentrl_form = form
