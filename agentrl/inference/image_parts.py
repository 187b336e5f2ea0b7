"""Gives a chat template messages with images and videos in the form that it takes.

Guarantees: a template gets none of them, only the place of one (``{"type": "image"}``), as transformers' processors
give it; one that renders lists of parts alone gets texts as a part, which is found out by trying it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.image_reader import ImageReader
from agentrl.core.images import images_of
from agentrl.core.message_shape import ImageRefused
from agentrl.core.template_marks import TemplateError
from agentrl.core.videos import is_video_url

_MARK = "agentrl0text0here"  # occurs in no template
_PLACES = {"image_url": {"type": "image"}, "video_url": {"type": "video"}}


class ShownImages:
    """The images of messages: refused where they cannot be sent, else put into rendered texts as placeholders.

    Args:
        reader: Reader of the model's images; ``None`` for a model that takes none.
        why: Why it takes none; empty for a model of text, whose messages may hold none at all.

    Attributes:
        reader: As given.
        possible: Whether messages may hold images, be they refused later.
    """

    def __init__(self, reader: ImageReader | None, why: str) -> None:
        self.reader = reader
        self.possible = reader is not None or bool(why)
        self._refused = "" if reader is not None else why
        self._no_videos = ""

    def refuse(self, why: str) -> None:
        """Has images refused although the model takes them."""
        self._refused = self._refused or why

    def refuse_videos(self, why: str) -> None:
        """Has videos refused although the model takes them."""
        self._no_videos = why

    def check(self, messages: Sequence[Message]) -> None:
        """Refuses images and videos where the model or its servers take none.

        Raises:
            ImageRefused: A message holds an image or a video.
        """
        shown = [(message.get("role"), url) for message in messages for url in images_of(message)]
        if shown and self._refused:
            raise ImageRefused(f"the {shown[0][0]} message holds an image, which cannot be sent: {self._refused}")
        role = next((role for role, url in shown if is_video_url(url)), None)
        if role is None or self.reader is None:
            return
        if why := self._no_videos or self.reader.no_videos:
            raise ImageRefused(
                f"the {role} message holds a video, which cannot be sent: {why}; or show frames as images"
            )

    def expanded(self, text: str, messages: Sequence[Message]) -> str:
        """Puts the placeholders of the messages' images and videos into their rendered text.

        Raises:
            TemplateError: The template leaves one out, or a message holds the text of a placeholder.
        """
        if self.reader is None:
            return text
        try:
            return self.reader.expanded(text, [url for message in messages for url in images_of(message)])
        except ValueError as error:
            raise TemplateError(str(error)) from error


def takes_text(render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether a template renders a content that is a text.

    Args:
        render: Renders messages as they are; raises :class:`TemplateError`.
    """

    def seen(content: Any) -> bool:
        try:
            return _MARK in render([{"role": "user", "content": content}])
        except TemplateError:
            return False

    return seen(_MARK) or not seen([_text(_MARK)])


def as_template_takes(messages: Sequence[Message], *, text: bool) -> list[Message]:
    """Returns messages with places instead of images.

    Args:
        messages: Messages in the one shape.
        text: Whether the template takes a content that is a text.
    """
    return [{**message, "content": _content(message.get("content"), text)} for message in messages]


def _content(content: Any, text: bool) -> Any:
    if isinstance(content, list):
        return [_PLACES.get(part.get("type"), part) for part in content]
    return content if text or not isinstance(content, str) else [_text(content)]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
