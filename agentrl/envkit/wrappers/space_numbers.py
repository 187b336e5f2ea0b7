"""Describes the bounds of numeric spaces in text, and reads numbers from JSON.

Guarantees: a number that is outside of its bounds, not finite, or not whole where it must be raises
:class:`ParseError`; no number is clipped or rounded to fit. Bounds and numbers are compared in the space's dtype.
"""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.envkit.tools.tool_arguments import quote

_EACH = 8  # up to so many numbers, different bounds are listed one by one

Space = spaces.Space[Any]


class ParseError(ValueError):
    """Raised for a text that is not an element of the space; the message is for the model."""


class UnsupportedSpaceError(TypeError):
    """Raised for a space of an unknown kind, or with too many numbers."""


def leaves(data: Any, want: int) -> list[Any]:
    """Flattens nested lists; raises ``ParseError`` unless they have ``want`` items."""
    found: list[Any] = []
    waiting = [data]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(reversed(item))
        else:
            found.append(item)
    if len(found) != want:
        raise ParseError(f"want {want} number{'s' * (want != 1)}, got {len(found)}")
    return found


def integer(value: Any, low: int, high: int) -> int:
    """Returns ``value`` if it is a whole number within the bounds; raises ``ParseError`` otherwise."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not low <= value <= high:
        raise ParseError(f"{quote(value)} is not a whole number from {low} to {high}")
    return int(value)


def number(value: Any, low: float, high: float, dtype: np.dtype[Any]) -> float:
    """Returns ``value`` rounded to ``dtype`` if finite and within the bounds; raises ``ParseError`` otherwise."""
    exact = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308:
        with np.errstate(over="ignore"):
            exact = float(np.array(value, dtype=dtype))  # bounds are of this precision too
    if not math.isfinite(exact) or not low <= exact <= high:
        raise ParseError(f"{quote(value)} is not a number{in_words(low, high)}")
    return exact


def bounds(space: Space) -> tuple[Any, Any, tuple[int, ...], np.dtype[Any]]:
    """Returns lowest and highest values, shape and dtype of a numeric space."""
    if isinstance(space, spaces.Box):
        return space.low, space.high, space.shape, np.dtype(space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        low = np.asarray(space.start)
        return low, low + space.nvec - 1, space.nvec.shape, np.dtype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        zeros = np.zeros(space.shape, dtype=np.int8)
        return zeros, zeros + 1, zeros.shape, np.dtype(np.int8)
    raise UnsupportedSpaceError(f"{short(space)} cannot be told in text")


def describe_numbers(space: Space) -> str:
    """Describes the form of an element, as part of a sentence."""
    low, high, shape, dtype = bounds(space)
    kind = "number" if dtype.kind == "f" else "whole number"
    pairs = list(zip(low.ravel().tolist(), high.ravel().tolist(), strict=True))
    ranges = [in_words(*pair) for pair in pairs]
    if len(pairs) == 1:
        return f"a {kind}{ranges[0]}"
    shaped = "" if len(shape) == 1 else f" (shape {' x '.join(map(str, shape))}, row by row)"
    if len(set(ranges)) == 1:
        return f"a JSON list of {len(pairs)} {kind}s{shaped}" + (f", each{ranges[0]}" if ranges[0] else "")
    if len(pairs) <= _EACH:
        return f"a JSON list of {len(pairs)} {kind}s{shaped}:{';'.join(one or ' any' for one in ranges)}"
    widest = in_words(low.min().item(), high.max().item())
    return f"a JSON list of {len(pairs)} {kind}s{shaped}, each in bounds of its own{widest}"


def in_words(low: float, high: float) -> str:
    """Describes bounds in words, after a space; empty if there are none."""
    if math.isinf(low) and math.isinf(high):
        return ""
    if math.isinf(high):
        return f" of at least {low:.4g}"
    if math.isinf(low):
        return f" of at most {high:.4g}"
    return f" from {low} to {high}" if isinstance(low, int) else f" from {low:.4g} to {high:.4g}"


def short(space: Space) -> str:
    """Abbreviates a space, for error messages."""
    text = " ".join(repr(space).split())
    return text if len(text) <= 80 else f"{type(space).__name__}{space.shape or ''}"
