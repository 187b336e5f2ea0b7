"""Compares values, finds their first difference, and copies values for a later comparison.

Guarantees: NaN equals NaN; arrays are compared element by element; a difference is reported with its path.
"""

import copy
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def first_difference(one: Any, other: Any, path: str = "") -> str:
    """Describes the first difference, such as ``[0]['content']: 'a' != 'b'``; empty if there is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{path}: keys {_SHORT.repr(list(one))} != {_SHORT.repr(list(other))}"
        return next((d for key in one if (d := first_difference(one[key], other[key], f"{path}[{key!r}]"))), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{path}: {len(one)} entries != {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, (a, b) in pairs if (d := first_difference(a, b, f"{path}[{i}]"))), "")
    return "" if _equal(one, other) else f"{path}: {_SHORT.repr(one)} != {_SHORT.repr(other)}"


def _equal(one: Any, other: Any) -> bool:
    if hasattr(one, "dtype") and hasattr(other, "dtype"):
        import numpy as np

        a, b = np.asarray(one), np.asarray(other)
        return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    if isinstance(one, float) and isinstance(other, float) and one != one and other != other:
        return True
    return bool(one == other)


def short(value: Any) -> str:
    """Abbreviates the ``repr`` of a value."""
    return _SHORT.repr(value)


def snapshot(value: Any) -> Any:
    """Returns a deep copy, which later changes of ``value`` do not affect."""
    return copy.deepcopy(value)
