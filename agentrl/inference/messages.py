"""Takes the chat messages that agents pass in, and compares them by what a model sees of them.

Guarantees: a message that an agent passes back equals the one it got, in every shape that ``openai``'s types have for
it (:mod:`agentrl.core.message_shape`): as an object or a dict, with or without unset fields, as parts or text, with
arguments as an object or as text; with or without its reasoning, which many agents leave out.
"""

import json
from collections.abc import Iterable
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.message_shape import arguments_object

_SEEN = ("role", "content", "name", "tool_call_id")
_SELDOM = ("name", "tool_call_id", "tool_calls")  # what a model sees of a message beside its role and content


def essence(message: Message) -> str:
    """Returns a key of what a model sees of a message; equal messages have equal keys."""
    content = message.get("content")
    if isinstance(content, str) and content and not any(message.get(key) for key in _SELDOM):
        return repr((message["role"], content))  # for most messages; much faster than JSON
    seen: dict[str, Any] = {key: message[key] for key in _SEEN if message.get(key)}
    calls = message.get("tool_calls")
    if calls:
        seen["tool_calls"] = [
            [c.get("id"), (c.get("function") or {}).get("name"), _arguments((c.get("function") or {}).get("arguments"))]
            for c in calls
        ]
    return json.dumps(seen, sort_keys=True)


def essences(message: Message) -> tuple[str, ...]:
    """Returns the keys under which a message is found, the exact one first: with its reasoning, and without it.

    Agents may leave the reasoning out; where they pass it back, it tells apart samples with the same answer.
    """
    key, reasoning = essence(message), message.get("reasoning_content")
    return (f"{key}\n{reasoning}", key) if reasoning else (key,)


def _arguments(given: Any) -> Any:
    """Returns arguments as the object that they encode, or unchanged where they encode none."""
    found = arguments_object(given)
    return given if found is None else found


def before_stop(text: str, stops: Iterable[str]) -> str:
    """Returns the text before the first stop string in it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
