"""The images of a model's sequences: the arguments of its forward pass that hold them.

Guarantees: a placeholder that stands in a message with images gets a feature of theirs, in order; one that the policy
itself sampled is a token like any other, in the trainer as in the server. Arguments are made by the model's own
processor and called by the names of its own forward pass; no class of models is known by name.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.core.image_reader import ImageReader
from agentrl.core.images import data_url, image_bytes
from agentrl.models.decoder import decoder_of

KINDS = "mm_token_type_ids"
"""Argument of models whose positions depend on images: 1 for placeholders of an image, 2 for those of a video."""

IDS = "input_ids"
_INNER = ("last_hidden_state", "hidden_states", "attentions")
"""What a tower returns beside its features: it may be computed by parameters that no text depends on."""

_BLANK = 32  # pixels of each side of a blank image
_NEUTRAL = 0  # token that stands for a sampled placeholder where the model looks for placeholders


class Pixels:
    """Makes the arguments of a model's forward pass for sequences with images.

    Args:
        model: A model with an image tower, or its decoder.
        reader: Reader of its images.
    """

    def __init__(self, model: Any, reader: ImageReader) -> None:
        self.reader = reader
        self._known = frozenset(inspect.signature(decoder_of(model).forward).parameters)

    def arguments(self, token_ids: Tensor, pictured: Tensor, images: Sequence[bytes]) -> dict[str, Tensor]:
        """Returns the arguments beside ``token_ids``; with ``input_ids`` if a placeholder was sampled.

        Args:
            token_ids: int64 ``[rows, length]``.
            pictured: bool ``[rows, length]`` whether a token is of a message that holds images.
            images: Bytes of the files of images and videos, row by row in the order of their placeholders.
        """
        shown = self.reader.are_placeholders(token_ids)
        sampled = shown & ~pictured
        found: dict[str, Tensor] = {}
        if bool(sampled.any()) and images:
            found[IDS] = token_ids.masked_fill(sampled, _NEUTRAL)
        if images:
            found |= self.tensors(images, token_ids.device)
            if KINDS in self._known:
                kinds = torch.where(token_ids == self.reader.token_id, 1, 2)
                found[KINDS] = (kinds * (shown & pictured)).int()
        return found

    def tensors(self, images: Sequence[bytes], device: torch.device) -> dict[str, Tensor]:
        """Returns the arguments that hold images and videos alone."""
        arrays = self.reader.arrays(images)
        return {name: torch.as_tensor(one).to(device) for name, one in arrays.items() if name in self._known}

    def idle(self, decoder: Any, device: torch.device) -> Tensor:
        """Computes the features of a blank image and returns 0, which depends on the tower's parameters.

        Ranks that share a sharded tower must use it in the same passes, whether or not their own rows hold images.
        """
        found = decoder.get_image_features(**self.tensors([_blank()], device))
        used = [found[name] for name in found if name not in _INNER]  # with those that enter at later layers
        return torch.stack([part.sum() for part in _tensors(used)]).sum() * 0


def _tensors(found: Any) -> Iterator[Tensor]:
    """Yields the tensors in lists and tuples of any depth."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for one in found:
            yield from _tensors(one)


@lru_cache(maxsize=1)
def _blank() -> bytes:
    from PIL import Image

    return image_bytes(data_url(Image.new("RGB", (_BLANK, _BLANK), (90, 120, 150))))


def keep_pixels(model: Any, folder: Path, *, trust: bool = False) -> None:
    """Finds out whether a model takes images, and keeps what makes its arguments on its decoder.

    Args:
        model: The model.
        folder: Folder that it was loaded from.
        trust: Whether code that comes with it may run.
    """
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        return
    reader, _ = ImageReader.find(folder, trust=trust)
    if reader is not None:
        decoder_of(model).agentrl_pixels = Pixels(model, reader)


def pixels_of(model: Any) -> Pixels | None:
    """Returns what :func:`keep_pixels` kept; ``None`` for a model that takes no images."""
    return getattr(decoder_of(model), "agentrl_pixels", None)


@contextmanager
def embedded_as(model: Any, token_ids: Tensor, arguments: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields a model's arguments for tokens, whose embeddings are those of ``token_ids`` within the context.

    A model looks for the placeholders of images in its ``input_ids``; of one that was sampled it must see the embedding
    and not the placeholder.

    Args:
        model: Model that is called within the context.
        token_ids: int64 ``[rows, length]``.
        arguments: Arguments of :meth:`Pixels.arguments`.
    """
    ids = arguments.get(IDS)
    if ids is None:
        yield {IDS: token_ids, **arguments}
        return

    def original(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (token_ids, *args[1:]) if args and args[0] is ids else args

    hook = model.get_input_embeddings().register_forward_pre_hook(original)
    try:
        yield arguments
    finally:
        hook.remove()


def vision_parameters(model: Any) -> list[nn.Parameter]:
    """Returns the parameters of a model's image tower and projector: all that are not of its text model or its head."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        return []
    parts = [one for one in decoder_of(model).children() if isinstance(one, PreTrainedModel)]
    text = next((one for one in parts if one.config is text_config), None)
    if text is None:
        return []
    head = model.get_output_embeddings()
    own = {id(one) for part in (text, head) if part is not None for one in part.parameters()}
    return [one for one in model.parameters() if id(one) not in own]
