"""A recipe as YAML that a person reads and that loads again.

Guarantees: :func:`render` of a recipe, read back, is the same recipe; with comments every described key carries its
description.
"""

from pydantic import BaseModel

from agentrl.config.recipe import Recipe
from agentrl.config.yaml12 import write_yaml

_WIDTH = 44  # column at which comments start


def render(recipe: Recipe, comments: bool = True) -> str:
    """The recipe as YAML text.

    Args:
        recipe: The recipe to render.
        comments: Put each field's description behind it.
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
