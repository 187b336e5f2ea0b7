"""Parts of a message's content that show something: an image or a video, each in the one shape of its kind.

Guarantees: what an environment or a tool shows becomes plain data at the first place that sees it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.images import PARTS as IMAGES
from agentrl.core.images import ImageError, image_part, is_pil
from agentrl.core.videos import PARTS as VIDEOS
from agentrl.core.videos import video_part

PARTS = (*IMAGES, *VIDEOS)
"""Types of a part that holds an image or a video."""

_UNREAD = (
    *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
    *("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"),
)  # keys with which other libraries (qwen_vl_utils) have a part resized or cut


def shown_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of one of :data:`PARTS` in the one shape that agentrl uses.

    Raises:
        ImageError: It names nothing that can be read, or asks for another size.
    """
    if asked := [key for key in _UNREAD if part.get(key) is not None]:
        raise ImageError(
            f"{asked[0]} of a part is not read here, and the model would see another size: resize the image before, or "
            "set the sizes in the model's preprocessor_config.json"
        )
    return video_part(part) if part.get("type") in VIDEOS else image_part(part)


def as_data(messages: Any) -> Any:
    """Returns messages whose PIL images and videos are data URLs; the same object if there are none.

    Args:
        messages: A list or tuple of messages; what is no message stays as it is.
    """
    if not any(_holds_objects(message) for message in messages):
        return messages
    return type(messages)(_without_objects(one) if _holds_objects(one) else one for one in messages)


def _holds_objects(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(map(is_object, content))


def is_object(part: Any) -> bool:
    """Whether a part shows something that is no plain data: a PIL image, or a video of PIL images or paths."""
    if not isinstance(part, Mapping) or part.get("type") not in PARTS:
        return False
    given = [value.get("url") if isinstance(value, Mapping) else value for value in part.values()]
    inner = [one for value in given for one in (value if isinstance(value, list | tuple) else [value])]
    return any(is_pil(one) or (part["type"] in VIDEOS and isinstance(one, Path)) for one in inner)


def _without_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [shown_part(part) if is_object(part) else part for part in message["content"]]}
