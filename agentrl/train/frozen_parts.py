"""Freezes parts of a model that ``trainer.freeze`` names.

Guarantees: a frozen parameter gets no gradient and no update, and is published and exported as it is.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.models.pixels import vision_parameters
from agentrl.train.policy import ModelRefused


def freeze(model: Any, parts: Sequence[str]) -> None:
    """Freezes parts of a model, in place.

    Args:
        model: Causal LM, with or without an image tower.
        parts: Names of parts: ``vision`` is the image tower with its projector.

    Raises:
        ModelRefused: The model has no such part.
    """
    if "vision" not in parts:
        return
    frozen = vision_parameters(model)
    if not frozen:
        raise ModelRefused(f"trainer.freeze=[vision]: {type(model).__name__} has no image tower")
    for parameter in frozen:
        parameter.requires_grad_(False)
