"""Chooses transformers' auto class for a config: that of causal language models, else that of models with images.

Guarantees: a model is loaded as text alone where there is a class for that, else with its image tower, so that trainer,
engine and export have the same weights under the same names.
"""

from typing import Any

from agentrl.core.image_reader import has_image_class


def auto_class(config: Any) -> Any:
    """Returns the auto class that makes a config's model.

    Args:
        config: Config as it was loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_image_class(config) else AutoModelForCausalLM


def is_brought(config: Any) -> bool:
    """Whether the class of a config came with a model: its code was trusted when the config was read."""
    from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

    return type(config).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")


def makes_model(config: Any) -> bool:
    """Whether transformers has a causal language model for a config."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping
