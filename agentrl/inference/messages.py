"""Converts the chat messages that agents pass in, and compares them by what a model sees of them.

Guarantees: a message that an agent passes back equals the one it got, as ``openai``'s object or as a dict, with or
without unset fields.
"""

import json
from collections.abc import Iterable
from typing import Any

from agentrl.core.episode import Message

_SEEN = ("role", "content", "name", "tool_call_id")


def plain(message: Any) -> Message:
    """Returns a message as a new dict, without unset fields.

    Raises:
        TypeError: ``message`` is neither a dict nor one of ``openai``'s messages.
    """
    if hasattr(message, "model_dump"):
        return message.model_dump(exclude_none=True)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TypeError(f"chat.completions.create: a message must be a dict with a role, got {message!r:.200}")
    if all(isinstance(value, str) for value in message.values()):
        return dict(message)
    return json.loads(json.dumps({key: value for key, value in message.items() if value is not None}, default=_dumped))


def _dumped(value: Any) -> Any:
    """Returns a nested ``openai`` object as JSON data."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"chat.completions.create: a message holds a {type(value).__name__}, which is not JSON data")


def essence(message: Message) -> str:
    """Returns a key of what a model sees of a message; equal messages have equal keys."""
    if len(message) == 2 and isinstance(content := message.get("content"), str) and content:
        return repr((message["role"], content))  # for most messages; much faster than JSON
    seen: dict[str, Any] = {key: message[key] for key in _SEEN if message.get(key)}
    calls = message.get("tool_calls")
    if calls:
        seen["tool_calls"] = [
            [c.get("id"), (c.get("function") or {}).get("name"), (c.get("function") or {}).get("arguments")]
            for c in calls
        ]
    return json.dumps(seen, sort_keys=True)


def before_stop(text: str, stops: Iterable[str]) -> str:
    """Returns the text before the first stop string in it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
