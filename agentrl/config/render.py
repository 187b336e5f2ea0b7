"""Writes a recipe as YAML for people to read and for loading again.

Guarantees: reading the output of :func:`render` gives the same recipe; with comments, each key that has a description
is followed by it.
"""

from pydantic import BaseModel

from agentrl.config.recipe import Recipe
from agentrl.config.yaml12 import write_yaml

_WIDTH = 44  # column at which comments start


def render(recipe: Recipe, comments: bool = True) -> str:
    """Writes a recipe as YAML text.

    Args:
        recipe: Recipe to write.
        comments: Whether each field's description follows it as a comment.
    """
    return "\n".join(_lines(recipe, "", comments)) + "\n"


def _lines(section: BaseModel, indent: str, comments: bool) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            lines.append(_comment(f"{indent}{name}:", (type(value).__doc__ or "").partition("\n")[0], comments))
            lines += _lines(value, indent + "  ", comments)
        else:
            lines.append(
                _comment(
                    f"{indent}{name}: {write_yaml(list(value) if isinstance(value, tuple) else value)}",
                    field.description,
                    comments,
                )
            )
    return lines


def _comment(line: str, text: str | None, comments: bool) -> str:
    return f"{line:<{_WIDTH}}  # {text}" if comments and text else line
