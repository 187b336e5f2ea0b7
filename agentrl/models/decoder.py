"""The decoder of a causal language model: what computes the hidden states that the output head gets."""

import inspect
from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: Any) -> Any:
    """Returns a model's decoder; the model itself if it is one.

    Some classes name their output head ``decoder``, which transformers' own ``get_decoder`` then returns, and some have
    their decoder under another name than the one in which it looks. Of a model that takes images it is the part with
    the image tower, not the text model inside.
    """
    if "pixel_values" in inspect.signature(model.forward).parameters:
        return model.base_model
    inner = (model.get_decoder(), model.base_model, *model.children())
    found = next((one for one in inner if isinstance(one, PreTrainedModel) and one is not model), model)
    return found if model.get_output_embeddings() is not None else model.get_decoder()
