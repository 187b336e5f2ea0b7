"""Decodes tool arguments from the model's JSON, and explains errors in them to the model.

Guarantees: text that is not exactly one JSON object is refused, never repaired; an explanation is one line, quotes no
long value, and uses the model's own names.
"""

import json
from typing import Any

from pydantic import ValidationError

from agentrl.core.registry import nearest
from agentrl.core.strict_json import strict_json

_QUOTED = 80  # characters of a wrong value that an explanation quotes


class ToolArgumentError(ValueError):
    """Raised for arguments that a tool does not accept; the text is one line for the model."""


class UnparsableArgumentsError(ToolArgumentError):
    """Raised for arguments that are not a JSON object."""


def decode(tool: str, text: str) -> dict[str, Any]:
    """Parses ``text`` as a JSON object.

    Raises:
        UnparsableArgumentsError: ``text`` is not a JSON object, or has a duplicate key.
    """
    try:
        value = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise UnparsableArgumentsError(f"{tool}: the arguments are not valid JSON: {one_line(str(error))}") from error
    if not isinstance(value, dict):
        raise UnparsableArgumentsError(f"{tool}: want a JSON object as arguments, got {quote(value)}")
    return value


def encode(tool: str, arguments: dict[str, Any]) -> str:
    """Encodes arguments as JSON for pydantic, which accepts more from JSON: a list there can be a tuple.

    Raises:
        UnparsableArgumentsError: A value in ``arguments`` is not JSON, or a name is not a string.
    """
    try:
        if not all(isinstance(key, str) for key in arguments):
            raise TypeError("a name is not a string")
        return json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnparsableArgumentsError(f"{tool}: the arguments are not JSON values: {one_line(str(error))}") from error


def explained(
    tool: str, error: ValidationError, arguments: dict[str, Any], usage: str, names: list[str]
) -> ToolArgumentError:
    """Turns pydantic's error into one line for the model.

    Args:
        tool: The tool's name.
        error: The validation error.
        arguments: The arguments that were validated.
        usage: The tool's signature in words.
        names: Names of the parameters, to suggest the nearest to an unknown name.
    """
    found: dict[str, list[str]] = {}
    came: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        if item["type"] == "json_invalid":
            return UnparsableArgumentsError(f"{tool}: {one_line(item['msg'])}")
        path = _path(item["loc"], arguments)
        if item["type"] == "missing":
            text = "is missing"
        elif item["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            text = "is not known" + (nearest(path, names) if len(item["loc"]) == 1 else "")
        else:
            text = one_line(item["msg"])
            came[path] = f", got {quote(item['input'])}"
        texts = found.setdefault(path, [])
        if text not in texts:
            texts.append(text)
    lines = [f"argument {quote(path)}: {' or '.join(texts)}{came.get(path, '')}" for path, texts in found.items()]
    return ToolArgumentError(f"{tool}: {'; '.join(lines)} ({usage})")


def _path(location: tuple[int | str, ...], arguments: Any) -> str:
    """Formats the path of a wrong value in the model's own names: ``point.x``, ``items[3]``.

    Pydantic's location also contains branches of unions, which are left out.
    """
    path, value = "", arguments
    for depth, step in enumerate(location):
        if isinstance(value, dict) and (step in value or depth == len(location) - 1):
            path += f".{step}" if path else str(step)
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            path += f"[{step}]"
            value = value[step] if step < len(value) else None
    return path


def one_line(text: str) -> str:
    """Replaces every run of white space by one space."""
    return " ".join(text.split())


def quote(value: Any) -> str:
    """Formats any value as JSON in one short line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__} that is not JSON"
    text = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
