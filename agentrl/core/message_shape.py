"""Brings chat messages into one shape, whichever of ``openai``'s legal shapes they come in.

Guarantees: the result is plain JSON data with a role and a text as ``content``; ``tool_calls`` is a list with at least
one call or not there, and the arguments of a call are text; no key is ``None``. Parts of text become one text, a
refusal becomes text, ``function_call`` and its result become a tool call and its result. Where images are taken, the
content of a message with images is a list of parts, each a text or an image (:mod:`agentrl.core.images`), with
neighboring texts joined, or a video (:mod:`agentrl.core.videos`); elsewhere both are refused as what a text model
cannot read is everywhere (audio, files), with the role and the reason. Half of a surrogate pair, which UTF-8 cannot
hold, becomes U+FFFD. A message in this shape comes out equal.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.images import ImageError, api_part, data_url, is_pil
from agentrl.core.shown_parts import IMAGES, PARTS, VIDEOS, is_object, shown_part
from agentrl.core.valid_text import valid_data, valid_text

TEXT_ONLY = "models here read text alone"
_MAY_BE_SILENT = ("assistant", "function")  # roles whose content may be null
_TEXTS = {"text": "text", "refusal": "refusal"}  # type of a part -> its key
_THOUGHTS = {"thinking": "thinking", "reasoning": "reasoning"}  # parts that some APIs answer with


class MessageError(ValueError):
    """A message that cannot be brought into the form that a text model reads."""


class ImageRefused(MessageError):
    """A message with an image or a video, for a model or a server that takes none."""


def in_shape(message: Any, *, images: bool = False) -> Message:
    """Returns a message as a new dict in the one shape that agentrl uses.

    Args:
        message: A dict or an object of ``openai``, in any shape that ``openai``'s types allow.
        images: Whether the message may hold images and videos.

    Raises:
        TypeError: ``message`` is no message, or holds data that is not JSON.
        MessageError: The message holds what the model cannot read, or lacks what its role needs.
    """
    if not hasattr(message, "model_dump"):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"chat.completions.create: a message must be a dict with a role, got {message!r:.200}")
        if "content" in message and "refusal" not in message and all(isinstance(v, str) for v in message.values()):
            shaped = valid_data(dict(message))
            return shaped if shaped["role"] != "function" else _result(shaped)
    found = _without_unset(_as_data(_with_videos(message, images=images)))
    role, content, refusal = found.pop("role", None), found.pop("content", None), found.pop("refusal", "")
    if not isinstance(role, str):
        raise TypeError(f"chat.completions.create: a message must be a dict with a role, got {message!r:.200}")
    if content is None and role not in _MAY_BE_SILENT:
        raise MessageError(f"the {role} message has no content")
    text, thoughts = _texts(content, role, images=images)
    shaped: Message = {"role": role, "content": text + refusal if isinstance(text, str) else text, **found}
    if thoughts:
        shaped.setdefault("reasoning_content", thoughts)
    _refuse_sound(shaped)
    calls = _calls(shaped)
    if calls:
        shaped["tool_calls"] = calls
    return valid_data(_result(shaped) if role == "function" else shaped)


def for_api(message: Any) -> Any:
    """Returns a message whose images are in the form of OpenAI's chat API; the same object if it holds none.

    Raises:
        MessageError: An image cannot be read.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
        return message
    try:
        return {**message, "content": [api_part(part) if _is_image(part) else part for part in content]}
    except ImageError as error:
        raise MessageError(f"the {message.get('role')} message: {error}") from error


def arguments_object(arguments: Any) -> dict[str, Any] | None:
    """Returns a call's arguments as an object, ``None`` where they are not the text of a JSON object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return None
    return valid_data(found) if isinstance(found, dict) else None


def _as_data(message: Any) -> Message:
    """Returns a copy of a message as JSON data."""
    return json.loads(json.dumps(message, default=_dumped))


def _dumped(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True, warnings=False)
    if is_pil(value) or isinstance(value, Path):
        return data_url(value)
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return value.tolist()
    raise TypeError(f"chat.completions.create: a message holds a {type(value).__name__}, which is not JSON data")


def _without_unset(message: Message) -> Message:
    """Leaves out fields that say nothing: ``None``, and empty lists beside ``content``."""
    return {key: value for key, value in message.items() if value is not None and (value != [] or key == "content")}


def _texts(content: Any, role: str, *, images: bool = False) -> tuple[str | list[dict[str, Any]], str]:
    """Joins the parts of a content; returns the text, or the parts if one is an image, and the reasoning in it."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        raise MessageError(f"the {role} message's content is {_kind(content)}, want a text or text parts")
    parts, thoughts = [], ""
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
        if kind in _TEXTS and isinstance(part.get(_TEXTS[kind]), str):
            parts.append({"type": "text", "text": part[_TEXTS[kind]]})
        elif kind in _THOUGHTS:
            inner = _texts(part.get(_THOUGHTS[kind], part.get("text")), role)[0]
            thoughts += inner if isinstance(inner, str) else ""
        elif images and kind in PARTS:
            parts.append(_image(part, role))
        else:
            what = f"a part of type {kind!r}" if kind else f"a part {str(part)[:60]}"
            refused = ImageRefused if kind in PARTS else MessageError
            raise refused(f"the {role} message holds {what}: {TEXT_ONLY}, so send its content as text")
    joined = _joined(parts)
    if any(part["type"] != "text" for part in joined):
        return joined, thoughts
    return "".join(part["text"] for part in joined), thoughts


def _image(part: dict[str, Any], role: str) -> dict[str, Any]:
    if role == "assistant":
        what = "a video" if part["type"] in VIDEOS else "an image"
        raise MessageError(f"the assistant message holds {what}, and a policy writes text alone")
    try:
        return shown_part(part)
    except ImageError as error:
        raise MessageError(f"the {role} message: {error}") from error


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins neighboring texts, and leaves out empty ones."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or not found or found[-1]["type"] != "text":
            found.append(part)
        else:
            found[-1] = {"type": "text", "text": found[-1]["text"] + part["text"]}
    return [part for part in found if part["type"] != "text" or part["text"]]


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:60]})"


def _with_videos(message: Any, *, images: bool) -> Any:
    """Returns a message whose videos are data, or refuses it before anything opens their files."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list | tuple) or not any(_is_video(part) for part in content):
        return message
    role = message["role"]
    if not images:
        kind = next(part["type"] for part in content if _is_video(part))
        raise ImageRefused(
            f"the {role} message holds a video (a part of type {kind!r}): {TEXT_ONLY}, so describe it in words"
        )
    return {**message, "content": [_image(one, role) if _is_video(one) and is_object(one) else one for one in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGES


def _is_video(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in VIDEOS


def _refuse_sound(message: Message) -> None:
    if "audio" in message:
        raise MessageError(f"the {message['role']} message holds audio: {TEXT_ONLY}, so send its transcript")


def _calls(message: Message) -> list[dict[str, Any]]:
    """Takes the tool calls out of a message, in the one shape; ``function_call`` counts as one."""
    given = message.pop("tool_calls", [])
    legacy = message.pop("function_call", None)
    if legacy and given:
        raise MessageError("a message has tool_calls and function_call; leave out function_call")
    if legacy:
        name = legacy.get("name") if isinstance(legacy, dict) else None
        given = [{"id": _legacy_id(name), "type": "function", "function": legacy}]
    if given and message["role"] != "assistant":
        raise MessageError(f"the {message['role']} message has tool calls, which only the assistant makes")
    if not isinstance(given, list):
        raise MessageError(f"tool_calls is {_kind(given)}, want a list of calls")
    return [_call(call) for call in given]


def _call(given: Any) -> dict[str, Any]:
    call = _without_unset(given) if isinstance(given, dict) else {}
    if "function" not in call and isinstance(call.get("name"), str):  # the form without an envelope, as in datasets
        call = {"function": {key: call.pop(key) for key in ("name", "arguments") if key in call}, **call}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        kind = f"of type {call['type']!r} " if call.get("type", "function") != "function" else ""
        raise MessageError(f"the assistant message has a tool call {kind}without a function: {given!r:.80}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    head = {key: call[key] for key in ("id",) if key in call}
    rest = {key: value for key, value in call.items() if key not in ("id", "type", "function")}
    return {**head, "type": "function", "function": {**function, "arguments": arguments}, **rest}


def _result(message: Message) -> Message:
    """Turns the answer of ``function_call`` into the result of a tool."""
    return {"tool_call_id": _legacy_id(message.get("name")), **message, "role": "tool"}


def _legacy_id(name: Any) -> str:
    """An id for a call that has none, the same for the call and its answer."""
    return hashlib.sha256(valid_text(str(name)).encode()).hexdigest()[:9]
