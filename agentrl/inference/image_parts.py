"""Gives a chat template messages with images in the form that it takes.

Guarantees: a template gets no image, only the place of one (``{"type": "image"}``), as transformers' processors give
it; one that renders lists of parts alone gets texts as a part, which is found out by trying it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.template_marks import TemplateError

_MARK = "agentrl0text0here"  # occurs in no template


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
        return [{"type": "image"} if part.get("type") == "image_url" else part for part in content]
    return content if text or not isinstance(content, str) else [_text(content)]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
