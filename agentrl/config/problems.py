"""Translates pydantic's errors into messages for a user.

Guarantees: all problems are reported at once, each with its key, the value, the allowed values and the key's meaning.
"""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentrl.config.keys import choices, fields, section_of, unknown_key
from agentrl.config.overrides import describe

_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}
_BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}


def problems(error: ValidationError) -> list[str]:
    """Returns one line per problem in ``error``; a value that fits no type of a union is one problem."""
    return list(dict.fromkeys(_problem(dict(item)) for item in error.errors(include_url=False)))


def _key(place: Sequence[str | int]) -> str:
    """Returns the key of a problem's place, without the names that pydantic gives the types of a union."""
    parts = list(place)
    while len(parts) > 1 and isinstance(parts[-1], str) and _is_value(parts[:-1]):
        parts.pop()
    return ".".join(map(str, parts))


def _is_value(parts: Sequence[str | int]) -> bool:
    """Whether a place is a key that holds a value, or an item of its list, and not a section or a mapping."""
    field = fields().get(".".join(part for part in parts if isinstance(part, str)))
    mapping = field is not None and any(typing.get_origin(choice) is dict for choice in choices(field))
    return field is not None and section_of(field) is None and not mapping


def _problem(item: Mapping[str, Any]) -> str:
    key = _key(item["loc"])
    if item["type"] == "value_error":  # raised by our validators, whose message is complete
        text = str(item["ctx"]["error"])
        return text if key.partition(".")[0] in text else f"{key}: {text}"
    if not key:
        return str(item["msg"])
    if item["type"] == "extra_forbidden":
        return unknown_key(key)
    wanted = allowed(key)
    if item["type"] == "missing":
        return f"{key} is missing: it must be {wanted}"
    return f"{key} was {describe(item['input'])}, but must be {wanted}"


def allowed(key: str) -> str:
    """Describes a key's valid values, e.g. ``a number, greater than 0``."""
    own = fields().get(key)
    field = own or fields().get(key.rpartition(".")[0])  # an item of a list, or a value of a mapping, is its field's
    if field is None:
        return "something else"
    section = section_of(field)
    if section is not None:
        return f"a mapping with the keys {', '.join(section.model_fields)}"
    kinds: list[str] = []
    bounds: list[str] = [_bound(mark) for mark in field.metadata]
    for each in choices(field):
        choice = typing.get_args(each)[1] if own is None and typing.get_origin(each) is dict else each
        if typing.get_origin(choice) is typing.Annotated:
            kinds.append(_kind(typing.get_args(choice)[0]))
            for mark in typing.get_args(choice)[1:]:
                bounds += [_bound(part) for part in getattr(mark, "metadata", [mark])]
        else:
            kinds.append(_kind(choice))
    text = ", ".join([" or ".join(kinds), *[bound for bound in bounds if bound]])
    return f"{text} ({field.description})" if field.description else text


def _kind(choice: Any) -> str:
    origin = typing.get_origin(choice)
    if origin in (list, tuple):
        return f"a list of {_kind(typing.get_args(choice)[0])}"
    if origin is typing.Literal:
        return " or ".join(map(str, typing.get_args(choice)))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(choice))
    return "a mapping" if origin is dict else _KINDS.get(choice, str(choice))


def _bound(mark: Any) -> str:
    parts = [
        f"{words} {getattr(mark, name)}" for name, words in _BOUNDS.items() if getattr(mark, name, None) is not None
    ]
    return " and ".join(parts)
