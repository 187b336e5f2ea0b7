"""Reads images as a model's own processor does: placeholders in the text, and arrays for the forward pass.

Guarantees: placeholders and arrays are those of the model's processor in transformers, for every process that loads the
same folder, so a prompt has as many placeholders as its images have features; images alone are read, no video, so that
torchvision is not needed. Importing this needs neither torch nor transformers.
"""

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.extras import install_hint
from agentrl.core.images import EXTRA, image_bytes, opened

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that tell how a model's images are processed."""

COPIED = (*FILES, "video_preprocessor_config.json", "chat_template.json")
"""Files of a model with images that belong to a copy of it, beside config, tokenizer and weights."""

REMEMBERED = 256  # images whose placeholders are remembered: all episodes of a group have the same ones


class PromptImage(NamedTuple):
    """An image of a prompt, and the place of its placeholders.

    Attributes:
        url: Data URL of the image.
        start: Index of the first placeholder in the prompt's ids.
        end: Index after the last one.
    """

    url: str
    start: int
    end: int


class ImageReader:
    """Reads images with a processor of transformers.

    Args:
        processor: The model's processor, with an image processor and a tokenizer.

    Attributes:
        token: Text of the placeholder, as the chat template writes it, once for each image.
        token_id: Its id, which stands once for each feature in a prompt.
        name: Name of the processor's class.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id
        self.chat_template: str | None = processor.chat_template
        self.name = type(processor).__name__
        self._placeholders = lru_cache(maxsize=REMEMBERED)(self._placeholders_of)

    @classmethod
    def find(cls, folder: Path) -> tuple["ImageReader | None", str]:
        """Finds the reader of a model.

        Args:
            folder: Model folder.

        Returns:
            The reader; or ``None``, and why the model takes no images, which is empty for a model of text.
        """
        if not any((folder / name).is_file() for name in FILES):
            return None, ""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(folder))
        if not has_image_class(config):
            return None, f"of a {config.model_type} the text part alone is loaded"
        try:
            import PIL  # noqa: F401
        except ImportError:
            return None, f"images need Pillow: {install_hint(EXTRA)}"
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        kind = PROCESSOR_MAPPING.get(type(config), None)
        if kind is None or not hasattr(kind, "replace_image_token"):
            return None, f"transformers has no processor of {config.model_type} that tells its placeholders"
        return cls(_without_video(kind).from_pretrained(str(folder))), ""

    def placeholders(self, url: str) -> str:
        """Returns the text that stands for an image in a prompt."""
        return self._placeholders(url)

    def _placeholders_of(self, url: str) -> str:
        images = [opened(image_bytes(url))]
        out = self._processor(images=images, text=[self.token], return_text_replacement_offsets=True)
        ((found,),) = out["text_replacement_offsets"]
        return found["replacement"]

    def arrays(self, images: Sequence[bytes]) -> dict[str, Any]:
        """Returns the arrays of images, by the names of the model's arguments.

        Args:
            images: Bytes of the images' files, in the order of their placeholders.
        """
        pictures = [opened(data) for data in images]
        return dict(self._processor.image_processor(pictures, return_tensors="np"))

    def expanded(self, text: str, urls: Sequence[str]) -> str:
        """Puts the placeholders of images into a rendered text.

        Args:
            text: Text that holds :attr:`token` once for each image.
            urls: Data URLs of the images, in order.

        Raises:
            ValueError: The text holds it more or less often.
        """
        parts = text.split(self.token)
        if len(parts) != len(urls) + 1:
            raise ValueError(
                f"the rendered prompt holds the image placeholder {self.token!r} {len(parts) - 1} times, and its "
                f"messages hold {len(urls)} images: the chat template leaves images out, or a text of the messages "
                "holds the placeholder itself"
            )
        return "".join(
            part + (self.placeholders(url) if url else "") for part, url in zip(parts, [*urls, ""], strict=True)
        )

    def places(self, urls: Sequence[str], ids: Sequence[int]) -> list[PromptImage]:
        """Finds the placeholders of images in the ids of their text.

        Raises:
            ValueError: The ids hold more or fewer placeholders than the images have: the tokenizer splits them.
        """
        counts = [self.placeholders(url).count(self.token) for url in urls]
        found = [at for at, token in enumerate(ids) if token == self.token_id]
        if len(found) != sum(counts):
            raise ValueError(f"{len(found)} image placeholders were encoded, want {sum(counts)}")
        images: list[PromptImage] = []
        for url, count in zip(urls, counts, strict=True):
            own, found = found[:count], found[count:]
            images.append(PromptImage(url, own[0], own[-1] + 1))
        return images


def has_image_class(config: Any) -> bool:
    """Whether a model of this config is loaded with its image tower: no class of its text alone is known.

    Such a class is one of transformers, or one that comes with the model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind, brought = config.model_type, getattr(config, "auto_map", None) or {}
    if "AutoModelForCausalLM" in brought:
        return False
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def copy_processor(source: Path, target: Path) -> None:
    """Copies the files of a model's processor, beside those of the tokenizer, into another folder of the model."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _without_video(kind: Any) -> Any:
    """Returns a class of processors that needs no video processor, which torchvision would be needed for."""

    class ImagesAlone(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name in ("image_processor", "tokenizer")]

    ImagesAlone.__name__ = kind.__name__  # transformers looks at it
    return ImagesAlone
