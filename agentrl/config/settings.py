"""Turns settings that were given in Python into pairs of key and value.

Guarantees: a section is merged key by key, whether it is given as a keyword (``trainer={"learning_rate": 1e-6}``) or
under a dotted key; an unknown key gets the error of the command line, and so does a misspelled argument. Texts such as
``trainer.learning_rate=1e-6`` are passed on as they are.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.keys import fields, is_known, section_of, unknown_key
from agentrl.core.registry import closest

Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by dotted key, or texts as on the command line."""

Setting = str | tuple[str, Any]
"""One setting: a text ``key=value`` whose value is YAML, or a pair of key and value."""


PathOf = Callable[[Any], str]
"""Function that returns the path of a class or function, for its value in a recipe."""


def settings_of(
    overrides: Overrides | None, sections: Mapping[str, Any], *, path_of: PathOf = str, own: Sequence[str] = ()
) -> list[Setting]:
    """Returns all settings in order, later ones win: ``overrides`` first, then ``sections``.

    Args:
        overrides: Settings by dotted key, or texts.
        sections: Settings by section, the keywords of the call.
        path_of: Path of a class or function that is given as a value; in the place of a section it is the ``id``.
        own: Other arguments of the call, for the hint to a misspelled one.

    Raises:
        ConfigError: ``overrides`` is one text, or has keys that are no text; an argument is misspelled.
    """
    for name in sections:
        meant = closest(name, own, cutoff=0.7)
        if not is_known(name) and meant is not None:
            raise ConfigError(f"unknown key {name!r}, did you mean {meant!r}?")
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: want a dict, or a list of texts such as {overrides!r}")
    if isinstance(overrides, Mapping):
        first: list[Setting] = list(_flat(overrides, "", path_of))
    else:
        first = list(overrides or ())
    return [*first, *_flat(sections, "", path_of)]


def sets(settings: Sequence[Setting], wanted: str) -> bool:
    """Whether one of the settings is of a key, or of one below it."""
    keys = [one.partition("=")[0].strip() if isinstance(one, str) else one[0] for one in settings]
    return any(key == wanted or key.startswith(f"{wanted}.") for key in keys)


def checked(key: str, value: Any) -> tuple[str, Any]:
    """Returns a setting whose key is known and whose value a YAML file could hold.

    Raises:
        ConfigError: The key is unknown, and the message has the nearest one; or the value is an object.
    """
    if not is_known(key):
        raise ConfigError(unknown_key(key))
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={value!r:.80} is not plain data: {error}") from error
    return key, value


def _flat(given: Mapping[str, Any], prefix: str, path_of: PathOf) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}{name!r} is no key: want a text such as 'trainer.learning_rate'")
        key = f"{prefix}{name}"
        field = fields().get(key)
        is_section = field is not None and section_of(field) is not None
        if isinstance(value, Mapping) and is_section:
            yield from _flat(value, f"{key}.", path_of)
        elif isinstance(value, type | FunctionType):
            yield f"{key}.id" if is_section else key, path_of(value)
        else:
            yield key, str(value) if isinstance(value, Path) else value
