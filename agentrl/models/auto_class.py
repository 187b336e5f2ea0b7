"""Chooses transformers' auto class for a config: that of causal language models, else that of models with images.

Guarantees: a model of the second kind is used through its text side alone; its other parts are loaded and sent with it,
and stay as they are.
"""

from typing import Any


def auto_class(config: Any) -> Any:
    """Returns the auto class that makes a config's model.

    Args:
        config: Config as it was loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    brought = getattr(config, "auto_map", None) or {}  # code that comes with the model
    of_text = AutoModelForCausalLM.__name__ in brought or makes_model(config)
    with_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if with_images and not of_text else AutoModelForCausalLM


def makes_model(config: Any) -> bool:
    """Whether transformers has a causal language model for a config."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping
