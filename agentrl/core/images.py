"""Images in messages: parts of a content, kept as data URLs.

Guarantees: an image comes out as ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}``, whether
it came as a path, a ``file://`` URL, a data URL or a PIL image. Every server and the trainer see the same pixels: the
bytes of a file are kept unchanged if all decoders read them alike, else the image becomes a PNG of its RGB values as a
person sees them (:func:`as_rgb`), and so does a PIL image. Nothing is fetched over a network. Pillow is imported only
where an image is made or decoded; importing this module costs nothing.
"""

import base64
import binascii
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlparse

from agentrl.core.extras import install_hint

if TYPE_CHECKING:
    from PIL.Image import Image

EXTRA = "vision"  # the extra that brings Pillow
PARTS = ("image_url", "image", "input_image")
"""Types of a part that holds an image: OpenAI's chat API, transformers, and OpenAI's responses API."""

FRAMES = (b"II*\0", b"MM\0*")
"""First bytes of a TIFF, the file in which the frames of a video are kept (:mod:`agentrl.core.videos`)."""

_DATA = "data:image/"
_KINDS = {  # first bytes of a file -> its kind
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"BM": "bmp",
}
_REMEMBERED = 64  # images whose bytes are remembered by their data URL
_ALIKE = ("1", "L", "P", "RGB")  # Pillow's modes of files that all decoders read alike, unless they are transparent
_ORIENTATION = 0x0112  # tag of EXIF: how a camera was held; 1 is upright
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what Pillow raises for bytes that it cannot read


class ImageError(ValueError):
    """A part of a message that holds no image which can be read."""


def is_pil(value: Any) -> bool:
    """Whether a value is a PIL image; Pillow is not imported to find out."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def image_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part that holds an image in the one shape that agentrl uses.

    Args:
        part: A part whose type is one of :data:`PARTS`.

    Raises:
        ImageError: It names no image, or one that cannot be read.
    """
    return {"type": "image_url", "image_url": {"url": data_url(_named(part))}}


def api_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part that holds an image in the form of OpenAI's chat API, with the ``detail`` that it asks for.

    What the API shall fetch itself stays a URL; a part of another API's form stays as it is.

    Raises:
        ImageError: It names an image that cannot be read.
    """
    given = _named(part)
    elsewhere = isinstance(given, str) and not given.startswith(_DATA) and urlparse(given).scheme not in ("", "file")
    if given is None:
        return dict(part)
    inner = part.get("image_url")
    detail = next((one["detail"] for one in (inner, part) if isinstance(one, Mapping) and one.get("detail")), None)
    shown = {"url": given if elsewhere else data_url(given)}
    return {"type": "image_url", "image_url": shown | ({"detail": detail} if detail else {})}


def _named(part: Mapping[str, Any]) -> Any:
    """Returns what a part names as its image; ``None`` without any."""
    given = next((part[key] for key in ("image_url", "image", "url", "path") if part.get(key) is not None), None)
    return given.get("url") if isinstance(given, Mapping) else given


def data_url(given: Any) -> str:
    """Returns an image as a data URL.

    Args:
        given: A path, a ``file://`` URL, a data URL, or a PIL image.

    Raises:
        ImageError: It is no image, or its file cannot be read.
    """
    url = file_url(given)
    if image_bytes(url).startswith(FRAMES):
        raise ImageError(f"{str(given)[:80]!r} is a TIFF, which only a video may be: make a PNG of it")
    return url if is_pil(given) else _alike(url)


def file_url(given: Any) -> str:
    """Returns an image, or a file of frames, as a data URL; see :func:`data_url`."""
    if is_pil(given):
        return _png(given)
    if isinstance(given, Path):
        return _of_file(given)
    if not isinstance(given, str) or not given:
        raise ImageError(f"an image must be a path, a file:// URL, a data URL or a PIL image, got {given!r:.80}")
    if given.startswith(_DATA):
        image_bytes(given)
        return given
    if given.startswith("data:"):
        raise ImageError(f"{given[:40]!r} is no image: want data:image/png;base64,... or another kind of image")
    scheme = urlparse(given).scheme
    if scheme in ("http", "https", "ftp", "s3"):
        raise ImageError(f"images are not fetched over a network: download {given[:200]} and pass the file's path")
    return _of_file(Path(unquote(urlparse(given).path)) if scheme == "file" else Path(given))


@lru_cache(maxsize=_REMEMBERED)
def _alike(url: str) -> str:
    """Returns an image that all decoders read alike: the one given, or a PNG of its RGB values.

    Servers differ in what they make of transparent parts, 16 bits and a camera's orientation. Without Pillow the image
    stays as it is: then no model of this process reads it.
    """
    try:
        from PIL import Image
    except ImportError:
        return url
    data = image_bytes(url)
    with decoding(), Image.open(io.BytesIO(data)) as image:
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        if image.mode in _ALIKE and upright and not image.has_transparency_data:
            same = url_of(data)
            return url if url == same else same  # the one object, which messages hold
        return _png(image)


@lru_cache(maxsize=_REMEMBERED)
def image_bytes(url: str) -> bytes:
    """Returns the bytes of an image's file, or those of a video's frames, from its data URL.

    Raises:
        ImageError: The URL holds no bytes, or those of something else.
    """
    head, comma, text = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{url[:40]!r} is no data URL of an image: want data:image/png;base64,...")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{url[:40]!r}... is no base64: {error}") from error
    _kind(data, "a data URL")
    return data


def url_of(data: bytes) -> str:
    """Returns the data URL of the bytes of an image's file."""
    return f"{_DATA}{_kind(data, 'an image')};base64,{base64.b64encode(data).decode()}"


def images_of(message: Mapping[str, Any]) -> list[str]:
    """Returns the data URLs of a message's images and videos in their order; empty for a message of text."""
    content = message.get("content")
    if content is None or isinstance(content, str) or not isinstance(content, Sequence):
        return []
    kinds = [(part, part.get("type")) for part in content]
    return [part[kind]["url"] for part, kind in kinds if kind in ("image_url", "video_url")]


def text_of(content: Any) -> str:
    """Returns the text of a content, without its images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def shown_text(content: Any) -> str:
    """Returns a content for a person: its text, with ``[image]`` or ``[video]`` in the place of each."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return str(content)  # a record that another program wrote
    return "".join(_shown_part(part) if isinstance(part, Mapping) else str(part) for part in content)


def _shown_part(part: Mapping[str, Any]) -> str:
    if isinstance(part.get("text"), str):
        return part["text"]
    kind = str(part.get("type", "part"))
    return "[image]" if kind in PARTS else "[video]" if "video" in kind else f"[{kind}]"


def opened(data: bytes) -> "Image":
    """Returns an image in memory as RGB, from the bytes of its file.

    Raises:
        ImageError: The bytes are broken, or Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError(f"images need Pillow: {install_hint(EXTRA)}") from error
    with decoding(), Image.open(io.BytesIO(data)) as image:
        return as_rgb(image)


def as_rgb(image: "Image") -> "Image":
    """Returns a PIL image as RGB, as a person sees it.

    It is turned upright as its EXIF data say, transparent parts are white, and of 16 bits the upper 8 are taken.

    Raises:
        ImageError: Its values have no known range.
    """
    from PIL import Image, ImageOps

    turned = ImageOps.exif_transpose(image)
    if turned.mode == "F":
        raise ImageError("a PIL image of mode F says not which value is white: convert it to L or RGB")
    if turned.mode.startswith("I"):
        return _of_upper_bits(turned).convert("RGB")
    if turned.has_transparency_data:
        shown = turned.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    return turned.convert("RGB")


def _of_upper_bits(image: "Image") -> "Image":
    """Returns an image of integers as one of 8 bits: its 16 bits without the lower 8, or its values if they are 8."""
    wide = image.convert("I")
    least, most = cast(tuple[int, int], wide.getextrema())
    if least < 0 or most > 0xFFFF:
        raise ImageError(
            f"a PIL image of mode I has values from {least} to {most}, want 0 to 255, or 65535 for 16 bits"
        )
    if image.mode == "I" and most <= 0xFF:
        return wide.convert("L")
    return wide.point(lambda value: value * (1 / 256)).convert("L")


@contextmanager
def decoding(what: str = "the image") -> Iterator[None]:
    """Turns what Pillow raises for broken bytes of ``what`` into an :class:`ImageError`."""
    from PIL import Image

    try:
        yield
    except ImageError:
        raise
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise ImageError(f"{what} cannot be decoded: {error}") from error


def _png(image: Any) -> str:
    if image.width < 1 or image.height < 1:
        raise ImageError(f"a PIL image of {image.width} x {image.height} pixels holds nothing")
    buffer = io.BytesIO()
    with decoding():
        as_rgb(image).save(buffer, format="PNG")
    return url_of(buffer.getvalue())


def _of_file(path: Path) -> str:
    try:
        return url_of(path.read_bytes())
    except OSError as error:
        raise ImageError(f"the image {path} cannot be read: {error.strerror or error}") from error
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error


def _kind(data: bytes, what: str) -> str:
    found = next((kind for head, kind in _KINDS.items() if data.startswith(head)), None)
    if data.startswith(FRAMES):
        found = "tiff"
    if found is None and data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "webp"
    if found is None:
        raise ImageError(f"{what} holds no PNG, JPEG, WebP, GIF or BMP")
    return found
