"""Reads the errors of OpenAI-compatible APIs: what is worth repeating, what ends an evaluation, what can be mended.

Guarantees: no clock and no requests; an error that is not recognised is neither repeated nor fatal, and fails one
episode.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError

BUSY = frozenset({429, 503, 529})  # answers of an API that has too many requests; 529 is Anthropic's
_REPEATED = frozenset({408, 409, 425, 429})  # and all from 500 on
_BAD_GATEWAY = 502
SHORTEST_KEY = 8
HIDDEN = "[API key]"
_FATAL = frozenset({401, 403, 404})
_NO_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "insufficient credits", "credit balance is too low")
_FILTERED = (
    *("content_filter", "content management policy", "responsibleaipolicyviolation"),  # Azure
    *("input was flagged", "prompt was flagged", "flagged_input", "moderation"),  # OpenAI, OpenRouter
    *("access to this content for safety reasons", "content filtering policy"),  # OpenAI, Anthropic
    *("content violates", "content exists risk", "prohibited_content"),  # xAI, DeepSeek, Google
    *("data_inspection_failed", "datainspectionfailed", "inappropriate content"),  # Alibaba
)
_TOO_LONG = ("context_length_exceeded", "context length", "maximum model length", "prompt is too long")
_NOT_TAKEN = ("unsupported", "not support", "unrecognized", "unknown", "not permitted", "deprecated", "not allowed")
_READ = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "function_call"})  # keys that all APIs read
_ERRORS = ("error", "network_error")  # finish reasons of answers that the API's own provider did not end
_MENDS = {  # option -> what to send instead
    "max_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": None,
    "seed": None,
}


class AnsweredError(APIError):
    """An error inside an answer with status 200, as an API sends it whose own provider failed after it had begun.

    Attributes:
        status: HTTP status that stands in it; 502 where it names none.
    """

    def __init__(self, message: str, body: object, status: int) -> None:
        super().__init__(message, request=None, body=body)  # type: ignore[arg-type]
        self.status = status


def error_inside(answer: Any, *, proven: bool) -> AnsweredError | None:
    """Returns the error that an answer with status 200 holds in the place of choices, or inside its first choice.

    Args:
        answer: Answer of the client.
        proven: Whether this address has answered as an API before; until then an error without a status may be the
            answer of anything.
    """
    choices = getattr(answer, "choices", None)
    first = choices[0] if isinstance(choices, list) and choices else None
    given = getattr(answer if first is None else first, "error", None)
    if given is None and getattr(first, "finish_reason", None) not in _ERRORS:
        return None
    code = str(given.get("code")) if isinstance(given, dict) else ""
    if code.isdecimal() and 400 <= int(code) <= 599:
        return AnsweredError(f"Error code: {code} - {given}", given, int(code))
    if first is None and not proven:
        return None
    return AnsweredError(f"Error inside an answer: {given or 'no reason is told'}", given, _BAD_GATEWAY)


def status_of(error: APIError) -> int:
    """Returns the HTTP status of an error, 0 if there was no answer."""
    if isinstance(error, AnsweredError):
        return error.status
    return error.status_code if isinstance(error, APIStatusError) else 0


def is_fatal(error: APIError) -> bool:
    """Whether every other request would fail too: key, permission, model, address or an exhausted quota."""
    status = status_of(error)
    return status == 402 or (status in _FATAL and not is_filtered(error)) or (status == 429 and _says(error, _NO_QUOTA))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if not isinstance(error, APIError) or is_fatal(error):
        return False
    if isinstance(error, APIStatusError) and error.response.headers.get("x-should-retry") == "false":
        return False
    status = status_of(error)
    return isinstance(error, APIConnectionError) or status in _REPEATED or status >= 500


def is_filtered(error: APIError) -> bool:
    """Whether the API refused the prompt because of its content."""
    return status_of(error) in (400, 403, 422) and _says(error, _FILTERED)


def is_overflow(error: APIError) -> bool:
    """Whether the prompt does not fit the model's context."""
    return status_of(error) in (400, 413, 422) and _says(error, _TOO_LONG)


def pause_of(error: APIError, now: datetime | None = None) -> float | None:
    """Returns the seconds after which the API asks to come back, ``None`` if it does not say.

    Args:
        error: The error; ``retry-after-ms`` and ``retry-after`` of its headers are read, in seconds or as a date.
        now: The time, with its zone; by default the system's.
    """
    headers = error.response.headers if isinstance(error, APIStatusError) else {}
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / scale)
        except (KeyError, ValueError):
            continue
    try:
        date = parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def mend_of(error: APIError, sent: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Finds the option that the model refuses, and the one to send in its place.

    Args:
        error: The refusal.
        sent: Arguments of the request.

    Returns:
        Name of the option, and of another one that takes its value, ``None`` to leave it to the API; ``None`` if the
        refusal is of something else.
    """
    text = _text(error)
    if not _is_not_taken(error):
        return None
    for name, other in _MENDS.items():
        named = error.param == name if error.param else any(f"{mark}{name}{mark}" in text for mark in ("'", '"', "`"))
        if name in sent and named:
            return name, other
    return None


def refused_key(error: APIError, messages: Sequence[Any]) -> str | None:
    """Returns the key of the request's messages that a refusal names; ``None`` if it names none.

    Some APIs refuse in the history what they or others answer with, as ``reasoning_content``; others want it there.

    Args:
        error: The refusal.
        messages: Messages of the request.
    """
    if not _is_not_taken(error):
        return None
    text = _text(error)
    keys = {str(key) for message in messages if isinstance(message, Mapping) for key in message} - _READ
    return next((key for key in sorted(keys) if re.search(rf"\b{re.escape(key.lower())}\b", text)), None)


def _is_not_taken(error: APIError) -> bool:
    return status_of(error) in (400, 422) and _says(error, (*_NOT_TAKEN, "extra inputs", "extra_forbidden"))


def refused_option(error: APIError, sent: Mapping[str, Any]) -> str | None:
    """Returns the name of the option of a request that a refusal names, ``None`` if it names none."""
    if status_of(error) not in (400, 422):
        return None
    named = str(error.param or "").partition(".")[0]
    if named in (sent.get("extra_body") or {}):
        return f"extra_body.{named}"
    return named if named in sent and named not in ("messages", "model") else None


def lost_connection(error: APITimeoutError) -> APIConnectionError | None:
    """Returns the lost connection that ``openai`` calls a time-out; ``None`` for a time-out.

    Its transport on aiohttp takes every loss of a connection after it was made for one.
    """
    transport = error.__cause__
    cause = None if transport is None else transport.__cause__
    if not isinstance(cause, aiohttp.ClientConnectionError) or isinstance(cause, TimeoutError):
        return None
    return APIConnectionError(message=f"Connection error: {cause}".rstrip(": "), request=error.request)


def without_key(error: APIError, key: str) -> None:
    """Replaces an API key in an error's texts, which some APIs repeat there; the error is changed.

    Args:
        error: The error.
        key: The key, see :func:`hidden`.
    """
    error.message = hidden(error.message, key)
    error.args = tuple(hidden(one, key) if isinstance(one, str) else one for one in error.args)
    if error.body is not None:
        error.body = json.loads(hidden(json.dumps(error.body, default=str), key))


def hidden(text: str, key: str) -> str:
    """Returns a text without an API key.

    Args:
        text: Any text.
        key: The key; one of fewer than :data:`SHORTEST_KEY` characters is a word, and none.
    """
    return text if len(key) < SHORTEST_KEY else text.replace(key, HIDDEN)


def hide_in_choices(answer: Any, key: str) -> None:
    """Replaces an API key in the messages of an answer, where an API that repeats its request puts it."""
    for choice in answer.choices if len(key) >= SHORTEST_KEY else ():
        if key in repr(choice.message) and hasattr(choice.message, "model_dump"):
            data = hidden(json.dumps(choice.message.model_dump(warnings=False), default=str), key)
            choice.message = type(choice.message).construct(**json.loads(data))


def _says(error: APIError, words: tuple[str, ...]) -> bool:
    text = _text(error)
    return any(word in text for word in words)


def _text(error: APIError) -> str:
    return f"{error.message} {error.code or ''} {error.type or ''} {error.body or ''}".lower()
