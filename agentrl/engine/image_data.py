"""Images of a ``/generate`` call: ``image_data`` beside ``input_ids``, as SGLang takes them.

Guarantees: a prompt has exactly the placeholders that its images need, at the places that the call names
(``image_places``) or, without them, at all placeholders of the prompt in order; anything else is refused with the
numbers. Files and URLs are not read: an image comes as a data URL or as base64, a video as a data URL of its frames.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.core.image_reader import PromptImage
from agentrl.core.images import ImageError, image_bytes, opened
from agentrl.core.videos import frames_of, is_video
from agentrl.engine.params import BadRequestError, integer
from agentrl.models.pixels import Pixels

MOST = 64  # images of a prompt


def images_of_call(
    body: dict[str, Any], prompts: Sequence[Sequence[int]], pixels: Pixels | None, *, batch: bool
) -> list[tuple[PromptImage, ...]]:
    """Returns the images of each prompt of a call.

    Args:
        body: The call's body.
        prompts: Ids of each prompt.
        pixels: The model's way with images; ``None`` if it takes none.
        batch: Whether the call is a batch, whose ``image_data`` has one entry for each prompt.

    Raises:
        BadRequestError: The model takes no images, or the images do not fit the prompts.
    """
    data, places = body.get("image_data"), body.get("image_places")
    if not data:
        return [()] * len(prompts)
    if pixels is None:
        raise BadRequestError("image_data is given, and the model reads text alone")
    if batch and (not isinstance(data, list) or len(data) != len(prompts)):
        raise BadRequestError(f"image_data must have one entry for each of {len(prompts)} prompts")
    of_each = data if batch else [data]
    places = places if batch and places is not None else [places] * len(prompts)
    if len(places) != len(prompts):
        raise BadRequestError(f"image_places must have one entry for each of {len(prompts)} prompts")
    return [_images(_listed(own), where, ids, pixels) for own, where, ids in zip(of_each, places, prompts, strict=True)]


def _listed(data: Any) -> list[str]:
    found = [] if data is None else [data] if isinstance(data, str) else data
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRequestError("image_data must be a data URL or base64 of an image, or a list of them")
    if len(found) > MOST:
        raise BadRequestError(f"a prompt has at most {MOST} images, got {len(found)}")
    return found


def _images(data: list[str], places: Any, ids: Sequence[int], pixels: Pixels) -> tuple[PromptImage, ...]:
    """Checks the images of one prompt, and finds their placeholders."""
    urls = [_url(one) for one in data]
    reader = pixels.reader
    try:
        if places is None:
            return tuple(reader.places(urls, ids))
        counts = [reader.count(url) for url in urls]
    except ValueError as error:
        raise BadRequestError(f"image_data: {error}") from error
    if not isinstance(places, list) or len(places) != len(urls):
        raise BadRequestError(f"image_places must have one pair for each of {len(urls)} images")
    found: list[PromptImage] = []
    for url, count, place in zip(urls, counts, places, strict=True):
        if not isinstance(place, list) or len(place) != 2:
            raise BadRequestError(f"image_places: {place!r:.80} is no pair of a start and an end")
        before = found[-1].end if found else 0
        start, end = (integer("image_places", one, before, len(ids)) for one in place)
        own = sum(map(reader.are_placeholders, ids[start:end]))
        if own != count:
            raise BadRequestError(f"image_places: {own} placeholders from {start} to {end}, the image needs {count}")
        found.append(PromptImage(url, start, end))
    return tuple(found)


def _url(given: str) -> str:
    """Returns an image that can be decoded as a data URL."""
    url = given if given.startswith("data:") else f"data:image/png;base64,{given}"
    try:
        data = image_bytes(url)
        _ = frames_of(data) if is_video(data) else opened(data)
    except ImageError as error:
        raise BadRequestError(f"image_data: {error}") from error
    return url
