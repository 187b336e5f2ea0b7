"""Lists the dotted names of all recipe keys, and suggests the nearest one for an unknown key.

Guarantees: keys are derived from the recipe's models, so the list is always current; any key below an open mapping
(``env.kwargs``) is accepted, because only the component that receives the mapping knows its keys.
"""

import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from agentrl.config.key_hints import meant_key
from agentrl.config.recipe import Recipe, Section


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """Returns every dotted key of a recipe, sections included, with its pydantic field, in the order of the models."""
    return dict(_walk(Recipe, ""))


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field
        child = section_of(field)
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """Returns the section class that a field holds, or ``None`` if it holds a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """Returns the types and literals that a field may hold, with unions split."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def dotted_keys() -> list[str]:
    """Returns every key that can be set, for example ``trainer`` and ``trainer.learning_rate``."""
    return list(fields())


def is_open(key: str) -> bool:
    """Whether ``key`` holds a mapping whose keys the recipe does not know, such as ``env.kwargs``."""
    field = fields().get(key)
    return field is not None and typing.get_origin(field.annotation) is dict


def is_known(key: str) -> bool:
    """Whether ``key`` can be set."""
    if key in fields():
        return True
    parts = key.split(".")
    return any(is_open(".".join(parts[:depth])) for depth in range(1, len(parts)))


def unknown_key(key: str) -> str:
    """Returns the error message for an unknown key, with the key that is probably meant."""
    meant = meant_key(key, dotted_keys())
    return f"unknown key {key!r}, did you mean {meant!r}?" if meant else f"unknown key {key!r}"


def unknown_keys(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns an error message for each unknown key of nested ``data``."""
    found: list[str] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if not is_known(key):
            found.append(unknown_key(key))
        elif isinstance(value, Mapping) and not is_open(key) and section_of(fields()[key]) is not None:
            found += unknown_keys(value, f"{key}.")
    return found
