"""Chooses the class of transformers that a model is loaded with.

Guarantees: a model is loaded as text alone where transformers has a class for that, else with its image tower, so that
trainer, engine and export have the same weights under the same names.
"""

from typing import Any

from agentrl.core.image_reader import has_image_class


def auto_class(config: Any) -> Any:
    """Returns the auto class for a config: ``AutoModelForCausalLM``, or ``AutoModelForImageTextToText``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_image_class(config) else AutoModelForCausalLM
