"""Reads the errors of OpenAI-compatible APIs: what is worth repeating, what ends an evaluation, what can be mended.

Guarantees: no clock and no requests; an error that is not recognised is neither repeated nor fatal, and fails one
episode.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from openai import APIConnectionError, APIError, APIStatusError

BUSY = frozenset({429, 503, 529})  # answers of an API that has too many requests; 529 is Anthropic's
_REPEATED = frozenset({408, 409, 425, 429})  # and all from 500 on
SHORTEST_KEY = 8
HIDDEN = "[API key]"
_FATAL = frozenset({401, 403, 404})
_NO_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "insufficient credits", "credit balance is too low")
_FILTERED = ("content_filter", "content management policy", "input was flagged", "flagged_input", "moderation")
_TOO_LONG = ("context_length_exceeded", "context length", "maximum model length", "prompt is too long")
_NOT_TAKEN = ("unsupported", "not support", "unrecognized", "unknown", "not permitted", "deprecated", "not allowed")
_MENDS = {"max_tokens": "max_completion_tokens", "temperature": None, "seed": None}  # option -> what to send instead


def status_of(error: APIError) -> int:
    """Returns the HTTP status of an error, 0 if there was no answer."""
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
    if status_of(error) not in (400, 422):
        return None
    text = _text(error)
    if not any(words in text for words in (*_NOT_TAKEN, "extra inputs", "extra_forbidden")):
        return None
    for name, other in _MENDS.items():
        named = error.param == name if error.param else any(f"{mark}{name}{mark}" in text for mark in ("'", '"', "`"))
        if name in sent and named:
            return name, other
    return None


def refused_option(error: APIError, sent: Mapping[str, Any]) -> str | None:
    """Returns the name of the option of a request that a refusal names, ``None`` if it names none."""
    if status_of(error) not in (400, 422):
        return None
    named = str(error.param or "").partition(".")[0]
    if named in (sent.get("extra_body") or {}):
        return f"extra_body.{named}"
    return named if named in sent and named not in ("messages", "model") else None


def without_key(error: APIError, key: str) -> None:
    """Replaces an API key in an error's texts, which some APIs repeat there; the error is changed.

    Args:
        error: The error.
        key: The key; one of fewer than :data:`SHORTEST_KEY` characters is a word, and none.
    """
    if len(key) < SHORTEST_KEY:
        return
    error.message = error.message.replace(key, HIDDEN)
    error.args = tuple(one.replace(key, HIDDEN) if isinstance(one, str) else one for one in error.args)
    if error.body is not None:
        error.body = json.loads(json.dumps(error.body, default=str).replace(key, HIDDEN))


def _says(error: APIError, words: tuple[str, ...]) -> bool:
    text = _text(error)
    return any(word in text for word in words)


def _text(error: APIError) -> str:
    return f"{error.message} {error.code or ''} {error.type or ''} {error.body or ''}".lower()
