"""Chooses the layout of micro-batches for a model and a mesh."""

from typing import Any

from agentrl.models.pixels import pixels_of
from agentrl.models.way import form_of
from agentrl.train.context_parallel import SharedTokens
from agentrl.train.layout import Layout, Packed, Padded, PlainPacked, PlainPadded
from agentrl.train.mesh import RankMesh
from agentrl.train.row_attention import is_packed
from agentrl.train.rows import attention_span


def layout_of(model: Any, mesh: RankMesh | None = None) -> Layout:
    """Returns the layout that a Hugging Face model was prepared for, see :mod:`agentrl.train.row_attention`.

    Args:
        model: The model, or its decoder.
        mesh: Mesh of the ranks; with context parallelism they share the tokens of packed prefix trees.
    """
    span = attention_span(model.config.get_text_config(decoder=True).hidden_size)
    if mesh is not None and mesh.shape.context > 1:
        return SharedTokens(span, mesh)
    way = form_of(model).way
    if way.rows != "trees":
        return PlainPacked(span) if way.rows == "packed" else PlainPadded(span, pixels_of(model))
    return Packed(span, way) if is_packed(model) else Padded(span, way)
