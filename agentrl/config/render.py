"""Writes a recipe as YAML for people to read and for loading again.

Guarantees: reading the output of :func:`render` gives the same recipe; with comments, each key that has a description
is followed by it.
"""

import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from agentrl.config.recipe import Recipe
from agentrl.config.yaml12 import write_yaml

_WIDTH = 44  # column at which comments start


def render(recipe: Recipe, comments: bool = True, width: int | None = None) -> str:
    """Writes a recipe as YAML text.

    Args:
        recipe: Recipe to write.
        comments: Whether each field's description follows it as a comment.
        width: Columns at which comments go on in the next line; ``None`` leaves each in one line.
    """
    fields = ((line, text if comments else None) for line, text in _fields(recipe, ""))
    lines = [part for line, text in fields for part in _with_comment(line, text, width)]
    return "\n".join(lines) + "\n"


def _fields(section: BaseModel, indent: str) -> Iterator[tuple[str, str | None]]:
    """Yields the line of each key with its description."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:", (type(value).__doc__ or "").partition("\n")[0] or None
            yield from _fields(value, indent + "  ")
        else:
            yield f"{indent}{name}: {write_yaml(list(value) if isinstance(value, tuple) else value)}", field.description


def _with_comment(line: str, text: str | None, width: int | None) -> list[str]:
    """Returns a line with its comment; in a narrow terminal the comment goes on below, or begins below a long line."""
    if not text:
        return [line]
    if width is None:
        return [f"{line:<{_WIDTH}}  # {text}"]
    column = min(_WIDTH, width // 2)
    parts = textwrap.wrap(text, max(20, width - column - 5), break_on_hyphens=False)
    rest = [f"{'':<{column}}  # {part}" for part in parts]
    return [line, *rest] if len(line) > column else [f"{line:<{column}}  # {parts[0]}", *rest[1:]]
