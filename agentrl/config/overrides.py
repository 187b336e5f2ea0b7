"""Parses ``key=value`` texts and YAML files into nested mappings.

Guarantees: a value means the same in a file and on the command line; merging does not change its inputs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.keys import choices, fields, is_known, unknown_key
from agentrl.config.yaml12 import read_yaml, write_yaml

_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),  # before int, because a bool is an int
    (int, "a whole number"),
    (float, "a decimal number"),
    (str, "text"),
    (list, "a list"),
    (dict, "a mapping"),
)


def read_file(path: Path) -> dict[str, Any]:
    """Reads a YAML file as a mapping.

    Raises:
        ConfigError: The file cannot be read, is not YAML or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    data = read_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold 'key: value' lines, but is {describe(data)}")
    return data


def parse_override(text: str) -> tuple[str, Any]:
    """Parses ``a.b=value`` into key and value.

    Raises:
        ConfigError: The text has no ``=`` or no key, the key is unknown, or the value is not YAML.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        hint = "" if not key or not is_known(key) else f", as in {key}=VALUE"
        raise ConfigError(f"cannot read {text!r}: an override looks like section.key=value{hint}")
    if not is_known(key):
        raise ConfigError(unknown_key(key))
    value = read_yaml(raw, f"the value of {key}")
    field = fields().get(key)
    if field is not None and str in choices(field) and isinstance(value, bool | int | float):
        value = raw.strip()  # e.g. a run with the name 7
    return key, value


def set_key(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns a copy of ``data`` with the dotted ``key`` set; an earlier value is replaced."""
    first, _, rest = key.partition(".")
    result = dict(data)
    inner = result.get(first)
    result[first] = set_key(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``base`` with ``over`` merged in: mappings key by key, other values are replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def describe(value: Any) -> str:
    """Describes a value with its kind for a user, e.g. ``'fast' (text)``."""
    if value is None:
        return "null"
    kind = next((name for kind, name in _KINDS if isinstance(value, kind)), type(value).__name__)
    return f"{value!r} ({kind})" if isinstance(value, str) else f"{write_yaml(value)} ({kind})"
