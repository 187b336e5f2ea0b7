"""Describes Gymnasium's spaces and their elements in text, and parses text into elements.

Guarantees: for any text :func:`parse_value` returns an element of the space or raises :class:`ParseError`,
whose message says what is allowed; it never guesses, clips or rounds. Its work is bounded: spaces of more than
``MAX_NUMBERS`` numbers are refused, and only the end of a long text is read.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.envkit.tools.tool_arguments import quote
from agentrl.envkit.wrappers.space_numbers import (
    ParseError,
    Space,
    UnsupportedSpaceError,
    bounds,
    describe_numbers,
    integer,
    leaves,
    number,
    short,
)

MAX_NUMBERS = 64  # more numbers are an image or a simulator's state, unsuitable for text
MAX_CHARS = 4000  # only so many characters at an answer's end are read
_TAG = re.compile(r"<action>", re.IGNORECASE)
_END_TAG = re.compile(r"</action>", re.IGNORECASE)
_AROUND = " \t\r\n.,;:!?\"'`*_()[]"  # ignored around a word
_WORDS = re.compile(r"[^\s:=*`\"'.,;!?()\[\]<>]+")
_LAST_INTEGER = re.compile(r"(?<![\w.\-])-?\d{1,18}$")
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BETWEEN = re.compile(r"[,\s]+")


def check_space(space: Space, max_numbers: int = MAX_NUMBERS) -> None:
    """Check that a space can be described in text.

    Raises:
        UnsupportedSpaceError: The space is of an unknown kind, or has more than ``max_numbers`` numbers.
    """
    count = _count(space)
    if count > max_numbers:
        raise UnsupportedSpaceError(f"{short(space)} has {count} numbers, more than {max_numbers}: too many for text")


def check_names(space: Space, names: Sequence[str]) -> tuple[str, ...]:
    """Returns ``names`` if they name the elements of a ``Discrete`` space one by one.

    Raises:
        ValueError: The space is not ``Discrete``, the number of names is wrong, or two names read the same.
    """
    if not isinstance(space, spaces.Discrete) or len(names) != space.n:
        want = f"{space.n} names" if isinstance(space, spaces.Discrete) else "none: only Discrete actions have names"
        raise ValueError(f"action_names={list(names)} for {short(space)}: want {want}")
    if len({_key(name) for name in names}) != len(names) or not all(name.strip() for name in names):
        raise ValueError(f"action_names={list(names)}: two of them read the same, or one is empty")
    return tuple(names)


def describe_space(space: Space, names: Sequence[str] | None = None) -> str:
    """Describes the form of an element, as part of a sentence.

    Args:
        space: Space that :func:`check_space` accepts.
        names: Names of a ``Discrete`` space's elements, in order.
    """
    if isinstance(space, spaces.Discrete):
        if names:
            return f"one of: {', '.join(names)}"
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.MultiDiscrete | spaces.Box | spaces.MultiBinary):
        return describe_numbers(space)
    if isinstance(space, spaces.Text):
        charset = "".join(sorted(space.character_set))
        known = f" out of {charset!r}" if len(charset) <= 40 else ""
        return f"a text of {space.min_length} to {space.max_length} characters{known}"
    if isinstance(space, spaces.Dict):
        parts = "; ".join(f"{key!s}: {describe_space(one)}" for key, one in space.spaces.items())
        return f"a JSON object with {parts}"
    if isinstance(space, spaces.Tuple):
        return "a JSON list with " + "; ".join(describe_space(one) for one in space.spaces)
    raise UnsupportedSpaceError(f"{short(space)} cannot be told in text")


def describe_value(space: Space, value: Any, names: Sequence[str] | None = None) -> str:
    """Formats an element as text: its name, a text unchanged, any other as JSON with 4 digits per float."""
    if isinstance(space, spaces.Discrete):
        return names[int(value) - int(space.start)] if names else str(int(value))
    if isinstance(space, spaces.Text):
        return value
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key!s}: {describe_value(one, value[key])}" for key, one in space.spaces.items())
    return json.dumps(_rounded(to_json(space, value)), ensure_ascii=False)


def to_json(space: Space, value: Any) -> Any:
    """Converts an element to JSON data without rounding."""
    if isinstance(space, spaces.Dict):
        return {str(key): to_json(one, value[key]) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [to_json(one, part) for one, part in zip(space.spaces, value, strict=True)]
    return value if isinstance(value, str) else np.asarray(value).tolist()


def example(space: Space, names: Sequence[str] | None = None) -> str:
    """Returns the text of an example element, for instructions; :func:`parse_value` can parse it."""
    if isinstance(space, spaces.Discrete) and names:
        return names[0]
    value = _simplest(space)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_value(space: Space, text: str, names: Sequence[str] | None = None) -> Any:
    """Parse an answer's action from the last ``<action>`` tag, or without a tag from the text's end.

    Without a tag, a ``Discrete`` action is the last word or whole number, a ``Text`` action the whole text, and
    any other action the last line, from its first bracket on.

    Args:
        space: Space that :func:`check_space` accepts.
        text: The model's answer.
        names: Names of a ``Discrete`` space's elements, in order; numbers are accepted too.

    Raises:
        ParseError: The text is not an element of the space.
    """
    text = text[-MAX_CHARS:]
    tags = list(_TAG.finditer(text))
    said = _END_TAG.split(text[tags[-1].end() :], maxsplit=1)[0].strip() if tags else text.strip()
    if isinstance(space, spaces.Discrete):
        value = _discrete(space, said, names, whole=bool(tags))
    elif isinstance(space, spaces.Text):
        value = _text(space, said)
    else:
        value = _from_json(space, _decode(said if tags else _last_line(said), space))
    if not space.contains(value):
        raise ParseError(f"{quote(said)} is not {describe_space(space, names)}")
    return value


def _discrete(space: spaces.Discrete, said: str, names: Sequence[str] | None, *, whole: bool) -> int:
    start = int(space.start)
    table = {_key(name): start + i for i, name in enumerate(names or ())}
    bare = said.strip(_AROUND) or said
    found = table.get(_key(bare), table.get(_key(said)))
    if found is not None:
        return found
    words = [] if whole else _WORDS.findall(bare)[-3:]
    for first in range(len(words)):  # longest first: "turn left" before "left"
        found = table.get(_key("".join(words[first:])))
        if found is not None:
            return found
    number = _LAST_INTEGER.search(bare)
    if number is not None and (not whole or number.start() == 0):
        return integer(int(number[0]), start, start + int(space.n) - 1)
    raise ParseError(f"{quote(said[-60:])} is not {describe_space(space, names)}")


def _text(space: spaces.Text, said: str) -> str:
    if not space.contains(said) and said.startswith('"'):
        try:
            return str(json.loads(said))
        except (ValueError, RecursionError):
            return said
    return said


def _last_line(said: str) -> str:
    lines = said.rstrip("` \t\r\n").splitlines()
    line = lines[-1] if lines else ""
    bracket = min((i for i in (line.find("["), line.find("{")) if i >= 0), default=-1)
    if bracket >= 0:
        return line[bracket:].rstrip(" .!`*")
    words = _BETWEEN.split(line.rstrip(" .!`*"))
    first = len(words)
    while first and _NUMBER.fullmatch(words[first - 1]):
        first -= 1
    return " ".join(words[first:])


def _decode(said: str, space: Space) -> Any:
    said = re.sub(r"^```\w*|```$", "", said).strip()
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        parts = _BETWEEN.split(said.strip("[](), \t\r\n"))
        if isinstance(space, spaces.Dict | spaces.Tuple) or not all(map(_NUMBER.fullmatch, parts)):
            raise ParseError(f"{quote(said)} is not {describe_space(space)}") from None
    return [float(part) for part in parts]


def _from_json(space: Space, data: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return integer(data, int(space.start), int(space.start + space.n) - 1)
    if isinstance(space, spaces.Text):
        if not isinstance(data, str) or not space.contains(data):
            raise ParseError(f"{quote(data)} is not {describe_space(space)}")
        return data
    if isinstance(space, spaces.Dict):
        keys = {str(key): key for key in space.spaces}
        if not isinstance(data, dict) or set(data) != set(keys):
            raise ParseError(f"{quote(data)}: want a JSON object with exactly {', '.join(keys)}")
        return {key: _from_json(space.spaces[key], data[name]) for name, key in keys.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(data, list) or len(data) != len(space.spaces):
            raise ParseError(f"{quote(data)}: want a JSON list of {len(space.spaces)}")
        return tuple(_from_json(one, part) for one, part in zip(space.spaces, data, strict=True))
    low, high, shape, dtype = bounds(space)
    items = leaves(data, low.size)
    edges = list(zip(items, low.ravel().tolist(), high.ravel().tolist(), strict=True))
    floats = isinstance(space, spaces.Box) and dtype.kind == "f"
    numbers = [number(*one, dtype) if floats else integer(*one) for one in edges]
    return np.array(numbers, dtype=dtype).reshape(shape)


def _simplest(space: Space) -> Any:
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.Text):
        return min(space.character_set, key=lambda one: (not one.isalnum(), one)) * max(space.min_length, 1)
    if isinstance(space, spaces.Dict):
        return {str(key): _simplest(one) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_simplest(one) for one in space.spaces]
    low, high, shape, _ = bounds(space)
    nearest_to_zero = np.clip(np.zeros(shape, dtype=low.dtype), low, high)
    return nearest_to_zero.tolist()


def _count(space: Space) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_count(one) for one in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return sum(_count(one) for one in space.spaces)
    return 1 if isinstance(space, spaces.Discrete | spaces.Text) else int(bounds(space)[0].size)


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.4g}") if math.isfinite(data) else str(data)
    if isinstance(data, dict):
        return {key: _rounded(one) for key, one in data.items()}
    return [_rounded(one) for one in data] if isinstance(data, list) else data


def _key(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.casefold()) or name
