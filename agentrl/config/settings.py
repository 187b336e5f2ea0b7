"""Turns settings that were given in Python into pairs of key and value.

Guarantees: a section is merged key by key, whether it is given as a keyword (``trainer={"learning_rate": 1e-6}``) or
under a dotted key; an unknown key gets the error of the command line. Texts such as ``trainer.learning_rate=1e-6`` are
passed on as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.keys import fields, is_known, section_of, unknown_key

Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by dotted key, or texts as on the command line."""

Setting = str | tuple[str, Any]
"""One setting: a text ``key=value`` whose value is YAML, or a pair of key and value."""


def settings_of(overrides: Overrides | None, sections: Mapping[str, Any]) -> list[Setting]:
    """Returns all settings in order, later ones win: ``overrides`` first, then ``sections``.

    Raises:
        ConfigError: ``overrides`` is one text, or has keys that are no text.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: want a dict, or a list of texts such as {overrides!r}")
    if isinstance(overrides, Mapping):
        first: list[Setting] = list(_flat(overrides, ""))
    else:
        first = list(overrides or ())
    return [*first, *_flat(sections, "")]


def sets(settings: Sequence[Setting], wanted: str) -> bool:
    """Whether one of the settings is of a key, or of one below it."""
    keys = [one.partition("=")[0].strip() if isinstance(one, str) else one[0] for one in settings]
    return any(key == wanted or key.startswith(f"{wanted}.") for key in keys)


def checked(key: str, value: Any) -> tuple[str, Any]:
    """Returns a setting whose key is known.

    Raises:
        ConfigError: The key is unknown; the message has the nearest one.
    """
    if not is_known(key):
        raise ConfigError(unknown_key(key))
    return key, value


def _flat(given: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}{name!r} is no key: want a text such as 'trainer.learning_rate'")
        key = f"{prefix}{name}"
        field = fields().get(key)
        if isinstance(value, Mapping) and field is not None and section_of(field) is not None:
            yield from _flat(value, f"{key}.")
        else:
            yield key, str(value) if isinstance(value, Path) else value
