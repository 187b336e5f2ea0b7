"""Videos in messages: the frames of each, kept as one file in a data URL.

Guarantees: a video comes out as ``{"type": "video_url", "video_url": {"url": "data:image/tiff;base64,..."}}``, whether
it came as a list of images, in any form that :mod:`agentrl.core.images` takes, or as an animated file (GIF, WebP, PNG);
the file holds the frames' RGB values, uncut and in order. No image is kept as a TIFF, so that the bytes alone say that
they are a video. Films (MP4 and the like) are not decoded. Pillow is imported only where frames are made or decoded.
"""

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrl.core.images import (
    FRAMES,
    ImageError,
    as_rgb,
    data_url,
    decoding,
    file_url,
    image_bytes,
    is_pil,
    opened,
    url_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("video_url", "video", "input_video")
"""Types of a part that holds a video: chat APIs, transformers, and in the way of OpenAI's responses API."""

LEAST, MOST = 2, 1024  # frames of a video
_REMEMBERED = 64  # videos whose frames were counted


def video_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part that holds a video in the one shape that agentrl uses.

    Args:
        part: A part whose type is one of :data:`PARTS`.

    Raises:
        ImageError: It names no frames, or some that cannot be read.
    """
    given = next((part[key] for key in (*PARTS, "url", "path") if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    return {"type": "video_url", "video_url": {"url": _url(given)}}


def is_video(data: bytes) -> bool:
    """Whether bytes that a message's data URL holds are those of a video."""
    return data.startswith(FRAMES)


def is_video_url(url: str) -> bool:
    """Whether a data URL of a message's image or video holds a video."""
    return url.startswith("data:image/tiff;")


def frames_of(data: bytes) -> "list[Image]":
    """Returns the frames of a video as RGB, from the bytes of its file.

    Raises:
        ImageError: The bytes are broken, or Pillow is not installed.
    """
    from PIL import Image, ImageSequence

    with decoding("the frames of the video"), Image.open(io.BytesIO(data)) as file:
        return [as_rgb(frame) for frame in ImageSequence.Iterator(file)]


def _url(given: Any) -> str:
    if isinstance(given, str) and is_video_url(given):
        _count_of(given)
        return given
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        _count(len(given))
        return _tiff([as_rgb(one) if is_pil(one) else opened(image_bytes(data_url(one))) for one in given])
    try:
        frames = frames_of(image_bytes(file_url(given)))
    except ImageError as error:
        wanted = "a list of its frames, or an animated GIF, WebP or PNG"
        raise ImageError(f"a video must be {wanted}; take the frames out of any other: {error}") from error
    _count(len(frames))
    return _tiff(frames)


@lru_cache(maxsize=_REMEMBERED)
def _count_of(url: str) -> None:
    """Checks the frames of a video in the one shape, which is read in each turn of an episode."""
    _count(len(frames_of(image_bytes(url))))


def _count(frames: int) -> None:
    if not LEAST <= frames <= MOST:
        raise ImageError(f"a video has {LEAST} to {MOST} frames, got {frames}; show a single one as an image")


def _tiff(frames: "Sequence[Image]") -> str:
    if len({frame.size for frame in frames}) > 1:
        raise ImageError(f"the frames of a video must have one size, got {sorted({frame.size for frame in frames})}")
    buffer = io.BytesIO()
    frames[0].save(buffer, format="TIFF", compression="tiff_adobe_deflate", save_all=True, append_images=frames[1:])
    return url_of(buffer.getvalue())
