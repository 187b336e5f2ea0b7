"""Reads images and videos as a model's own processor does: placeholders in the text, arrays for the forward pass.

Guarantees: placeholders and arrays are those of the model's processor in transformers, for every process that loads the
same folder, so a prompt has as many placeholders as its images have features. All frames of a video are shown, none is
left out. What videos need (torchvision) is loaded when the first is read. Importing this needs neither torch nor
transformers.
"""

import importlib.util
import inspect
import re
import shutil
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.core.extras import install_hint
from agentrl.core.images import EXTRA, ImageError, data_url, image_bytes, opened
from agentrl.core.model_files import Unreadable, one_line, read_config, unreadable
from agentrl.core.videos import frames_of, is_video, is_video_url

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that tell how a model's images are processed."""

COPIED = (*FILES, "video_preprocessor_config.json", "chat_template.json")
"""Files of a model with images that belong to a copy of it, beside config, tokenizer and weights."""

SAMPLE = (112, 56)  # pixels of an image with which a processor is tried
REMEMBERED = 256  # images whose placeholders are remembered: all episodes of a group have the same ones


class PromptImage(NamedTuple):
    """An image or a video of a prompt, and the place of its placeholders.

    Attributes:
        url: Data URL of the image or the video.
        start: Index of the first placeholder in the prompt's ids.
        end: Index after the last one.
    """

    url: str
    start: int
    end: int


class ImageReader:
    """Reads images and videos with a processor of transformers.

    Args:
        processor: The model's processor, with an image processor and a tokenizer.
        folder: Folder of the model.

    Attributes:
        token: Text that the chat template writes once for each image.
        token_id: Id of the placeholder, which stands once for each feature in a prompt; most often that of ``token``.
        placeholder: Text of the token ``token_id``.
        video_token: Text of a video's placeholder; ``None`` if the processor knows none.
        video_token_id: Token id of that placeholder.
        name: Name of the processor's class.
    """

    def __init__(self, processor: Any, folder: Path) -> None:
        self._processor = processor
        self._folder = folder
        self.token: str = processor.image_token
        self.token_id: int = processor.image_token_id
        self.placeholder: str = processor.tokenizer.convert_ids_to_tokens(self.token_id)
        self.video_token: str | None = getattr(processor, "video_token", None)
        self.video_token_id: int | None = getattr(processor, "video_token_id", None)
        self.chat_template: str | None = processor.chat_template
        self.name = type(processor).__name__
        self._placeholders = lru_cache(maxsize=REMEMBERED)(self._placeholders_of)

    @classmethod
    def find(cls, folder: Path, *, trust: bool = False) -> tuple["ImageReader | None", str]:
        """Finds the reader of a model.

        Args:
            folder: Model folder.
            trust: Whether code that comes with the model may run.

        Returns:
            The reader; or ``None``, and why the model takes no images, which is empty for a model of text.
        """
        if not has_processor(folder):
            return None, ""
        try:
            config = read_config(folder, trust=trust)
        except Unreadable as error:
            return None, str(error)
        if not has_image_class(config):
            return None, f"of a {config.model_type} the text part alone is loaded"
        try:
            import PIL  # noqa: F401
        except ImportError:
            return None, f"images need Pillow: {install_hint(EXTRA)}"
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        try:
            kind = PROCESSOR_MAPPING.get(type(config), None)
            if kind is None:
                return None, f"transformers has no processor of {config.model_type}"
            reader = cls(_without_video(kind).from_pretrained(str(folder)), folder)
        except unreadable() as error:
            return None, f"the model's processor cannot be loaded ({one_line(error)})"
        why = reader._wrong()
        return (None, why) if why else (reader, "")

    def _wrong(self) -> str:
        """Returns why the processor cannot be used, found by giving it an image; empty if it can."""
        from PIL import Image

        try:
            count = self.count(data_url(Image.new("RGB", SAMPLE, "white")))
        except unreadable() as error:
            return f"transformers' {self.name} does not tell what stands for an image ({one_line(error)})"
        return "" if count else f"transformers' {self.name} puts no {self.placeholder!r} for an image"

    @cached_property
    def plain(self) -> bool:
        """Whether nothing but placeholders stands for an image: no marks around them or between rows and tiles."""
        from PIL import Image

        return not self.placeholders(data_url(Image.new("RGB", SAMPLE, "white"))).replace(self.placeholder, "")

    @property
    def no_videos(self) -> str:
        """Why the model takes no videos; empty if it takes some."""
        return self._videos[1]

    @cached_property
    def _videos(self) -> tuple[Any, str]:
        """The processor with the part that reads videos, and why there is none."""
        kind = type(self._processor).__mro__[1]
        if "video_processor" not in kind.get_attributes() or None in (self.video_token, self.video_token_id):
            return None, f"transformers' {self.name} reads none, or has no token of its own for them"
        if resizes_with_pillow():
            return None, f"transformers' {self.name} needs torchvision for them: install the one of your torch"
        from transformers import AutoVideoProcessor

        own = self._processor
        try:
            video = AutoVideoProcessor.from_pretrained(str(self._folder))
        except unreadable() as error:
            return None, f"the model's video processor cannot be loaded ({one_line(error)})"
        parts = {"image_processor": own.image_processor, "tokenizer": own.tokenizer, "video_processor": video}
        whole = kind(**parts, chat_template=own.chat_template)
        if shared := {*whole.image_processor.model_input_names} & {*video.model_input_names}:
            return None, f"transformers' {self.name} has the same {sorted(shared)} for images and videos"
        return whole, ""

    def placeholders(self, url: str) -> str:
        """Returns the text that stands for an image or a video in a prompt.

        Raises:
            ImageError: It cannot be read, or is a video and the model takes none.
        """
        return self._placeholders(url)

    def count(self, url: str) -> int:
        """Returns how many placeholders stand for an image or a video."""
        text = self.placeholders(url)
        return sum(text.count(one) for one in {self.placeholder, self.video_token} if one is not None)

    def are_placeholders(self, ids: Any) -> Any:
        """Whether ids are placeholders of images or videos; for an id or an array of them."""
        found = ids == self.token_id
        return found if self.video_token_id is None else found | (ids == self.video_token_id)

    def _placeholders_of(self, url: str) -> str:
        data = image_bytes(url)
        if is_video(data):
            out = self._read_videos([frames_of(data)], return_text_replacement_offsets=True)
            ((found,),) = out["text_replacement_offsets"]
            return found["replacement"]
        image = opened(data)
        try:
            out = self._processor(images=[image], text=[self.token], return_text_replacement_offsets=True)
        except ValueError as error:  # of a size that it does not take
            raise ImageError(
                f"the model's {self.name} takes no image of {image.width} x {image.height} pixels: {error}"
            ) from error
        ((found,),) = out["text_replacement_offsets"]
        return found["replacement"]

    def _read_videos(self, videos: Sequence[Any], **how: Any) -> Any:
        """Runs the processor on the frames of videos, as many as they are.

        Raises:
            ImageError: The model takes no videos.
        """
        whole, why = self._videos
        if whole is None or self.video_token is None:
            raise ImageError(f"the model takes no videos: {why}")
        return whole(videos=list(videos), text=[self.video_token * len(videos)], do_sample_frames=False, **how)

    def arrays(self, images: Sequence[bytes]) -> dict[str, Any]:
        """Returns the arrays of images and videos, by the names of the model's arguments.

        Each image is processed as the only one of its text, as its placeholders were counted: some processors cut an
        image into tiles only where it is alone.

        Args:
            images: Bytes of their files, in the order of their placeholders.
        """
        pictures = [opened(data) for data in images if not is_video(data)]
        videos = [frames_of(data) for data in images if is_video(data)]
        text = {*self._processor.tokenizer.model_input_names, "mm_token_type_ids"}
        found: dict[str, Any] = {}
        if pictures:
            each = {"images": [[one] for one in pictures], "text": [self.token] * len(pictures)}
            read = self._processor(**each, images_kwargs={"return_tensors": "pt"})
            found = {name: one for name, one in read.items() if name not in text}
        if videos:
            read = self._read_videos(videos, return_tensors="pt")
            own = {name: one for name, one in read.items() if name not in text}
            if shared := sorted(own.keys() & found.keys()):
                raise ImageError(f"{self.name} makes the same {shared} of images and videos: show one kind of them")
            found |= own
        return found

    def expanded(self, text: str, urls: Sequence[str]) -> str:
        """Puts the placeholders of images and videos into a rendered text.

        Args:
            text: Text that holds :attr:`token` once for each image, and :attr:`video_token` once for each video.
            urls: Data URLs of images and videos, in order.

        Raises:
            ValueError: The text holds one of them more or less often.
        """
        kinds = [("image", self.token, [url for url in urls if not is_video_url(url)])]
        if len(kinds[0][2]) < len(urls):
            assert self.video_token is not None, "videos were refused"
            kinds.append(("video", self.video_token, [url for url in urls if is_video_url(url)]))
        for kind, token, own in kinds:
            if (times := text.count(token)) != len(own):
                raise ValueError(
                    f"the rendered prompt holds the {kind} placeholder {token!r} {times} times, and its messages hold "
                    f"{len(own)} {kind}s: the chat template leaves {kind}s out, or a text of the messages holds the "
                    "placeholder itself"
                )
        waiting = {token: iter(own) for _, token, own in kinds}
        marks = "|".join(re.escape(token) for token in waiting)
        return re.sub(marks, lambda found: self.placeholders(next(waiting[found[0]])), text)

    def places(self, urls: Sequence[str], ids: Sequence[int]) -> list[PromptImage]:
        """Finds the placeholders of images and videos in the ids of their text.

        Raises:
            ValueError: The ids hold more or fewer placeholders than the images have: the tokenizer splits them.
        """
        counts = [self.count(url) for url in urls]
        found = [at for at, token in enumerate(ids) if self.are_placeholders(token)]
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


def has_processor(folder: Path) -> bool:
    """Whether the folder of a model tells how its images are processed."""
    return any((folder / name).is_file() for name in FILES)


def resizes_with_pillow() -> bool:
    """Whether processors resize images with Pillow here.

    transformers takes torchvision where it is installed, which gives other pixels.
    """
    return importlib.util.find_spec("torchvision") is None


def copy_processor(source: Path, target: Path) -> None:
    """Copies the files of a model's processor, beside those of the tokenizer, into another folder of the model."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _without_video(kind: Any) -> Any:
    """Returns a class of processors without the one of videos, which torchvision would be needed for."""
    video = inspect.signature(kind.__init__).parameters.get("video_processor")
    none = [] if video is None or video.default is not video.empty else [None]  # SmolVLM's cannot be left out

    class ImagesAlone(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name in ("image_processor", "tokenizer")]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], *values: Any, **kwargs: Any) -> Any:
            return super().from_args_and_dict([*args, *none], *values, **kwargs)

    ImagesAlone.__name__ = kind.__name__  # transformers looks at it
    return ImagesAlone
