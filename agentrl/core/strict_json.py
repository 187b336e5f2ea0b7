"""Parses JSON from a model strictly.

Guarantees: repeated keys of an object (it is unclear which value is meant), ``NaN`` and ``Infinity`` are refused. The
error is one short line.
"""

import json
from typing import Any, NoReturn

_SHOWN = 60  # characters of a key that an error repeats


def strict_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: The text is not JSON (:class:`json.JSONDecodeError`), repeats a key or has a number that JSON lacks.
        RecursionError: The JSON is nested too deep.
    """
    return json.loads(text, object_pairs_hook=unique, parse_constant=_refuse_constant)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns key-value pairs as a dict.

    Raises:
        ValueError: A key is repeated.
    """
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    keys = [key for key, _ in pairs]
    twice = next(key for key in keys if keys.count(key) > 1)
    shown = twice if len(twice) <= _SHOWN else twice[:_SHOWN] + "..."
    raise ValueError(f"{shown!r} is given twice")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
