"""Samples random JSON values from a JSON schema.

Guarantees: the value depends on the random generator alone; objects have their required properties and some of the
others; depth is bounded, so that recursive schemas end. ``pattern``, ``format``, ``not`` and other keywords that only
exclude values are ignored: the caller must validate the result.
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

TRIES = 20  # draws for each item of a list with unique items
MAX_DEPTH = 6  # nesting depth below which only required values are sampled
DEEPEST = 50  # largest nesting depth of required values
_LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
_SPREAD = 100  # largest distance of an unbounded number from 0, or from its only bound


def sample_json(schema: Any, rng: "np.random.Generator") -> Any:
    """Samples a value of ``schema``, a JSON schema (draft 2020-12) with only local ``$ref``."""
    return _sample(schema, rng, schema, 0)


def _sample(schema: Any, rng: "np.random.Generator", root: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return None  # the schema ``true``
    if depth > DEEPEST:
        raise ValueError("the schema requires infinitely nested values")
    if "$ref" in schema:
        return _sample(_resolve(schema["$ref"], root), rng, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            branches = schema[word]
            if depth >= MAX_DEPTH:  # branches without nested values end a recursion
                branches = [b for b in branches if not {"$ref", "properties", "items"} & set(b)] or branches
            rest = {key: value for key, value in schema.items() if key != word}
            return _sample(rest | branches[int(rng.integers(len(branches)))], rng, root, depth)
    if "allOf" in schema:
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            other = _resolve(part["$ref"], root) if "$ref" in part else part
            both = {
                "properties": {**merged.get("properties", {}), **other.get("properties", {})},
                "required": [*merged.get("required", []), *other.get("required", [])],
            }
            merged |= other | {name: value for name, value in both.items() if value}
        return _sample(merged, rng, root, depth)
    kind = schema.get("type") or ("object" if "properties" in schema else "array" if "items" in schema else "string")
    if isinstance(kind, list):
        kind = kind[int(rng.integers(len(kind)))]
    return _of_type(kind, schema, rng, root, depth)


def _of_type(kind: str, schema: dict[str, Any], rng: "np.random.Generator", root: Any, depth: int) -> Any:
    if kind == "object":
        return _object(schema, rng, root, depth)
    if kind == "array":
        fixed = [_sample(one, rng, root, depth + 1) for one in schema.get("prefixItems", [])]
        least = max(0, schema.get("minItems", 0) - len(fixed))
        most = max(least, min(schema.get("maxItems", least + 3) - len(fixed), least + 3))
        count = least if depth >= MAX_DEPTH or schema.get("items") is False else int(rng.integers(least, most + 1))
        found = fixed
        for _ in range(count * (TRIES if schema.get("uniqueItems") else 1)):
            value = _sample(schema.get("items", {}), rng, root, depth + 1)
            if len(found) < len(fixed) + count and not (schema.get("uniqueItems") and value in found):
                found = [*found, value]
        return found
    if kind == "string":
        least = schema.get("minLength", 0)
        length = int(rng.integers(least, min(schema.get("maxLength", least + 12), least + 12) + 1))
        return "".join(_LETTERS[int(i)] for i in rng.integers(len(_LETTERS), size=length))
    if kind in ("integer", "number"):
        return _number(schema, rng, whole=kind == "integer")
    return bool(rng.integers(2)) if kind == "boolean" else None


def _object(schema: dict[str, Any], rng: "np.random.Generator", root: Any, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    found: dict[str, Any] = {}
    names = [*properties, *(name for name in required if name not in properties)]
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        needed = name in required or len(found) + left <= schema.get("minProperties", 0)
        if needed or (depth < MAX_DEPTH and rng.random() < 0.5):
            found[name] = _sample(properties.get(name, {}), rng, root, depth + 1)
    return found


def _number(schema: dict[str, Any], rng: "np.random.Generator", *, whole: bool) -> float:
    """Samples a number within the bounds, with few digits if possible."""
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    if math.isinf(low):
        low = -_SPREAD if math.isinf(high) else high - _SPREAD
    high = min(high, low + _SPREAD) if math.isinf(high) else high
    step = schema.get("multipleOf", 1 if whole else None)
    if step is not None:
        first = math.floor(low / step) + 1 if low in _exclusive(schema) else math.ceil(low / step)
        last = math.ceil(high / step) - 1 if high in _exclusive(schema) else math.floor(high / step)
        value = step * (first + int(rng.random() * (max(last, first) - first + 1)))
        return int(value) if whole else value
    value = low + rng.random() * (high - low)
    short = round(value, 3)
    return float(short if low < short < high else (value if low < value else (low + high) / 2))


def _exclusive(schema: dict[str, Any]) -> set[float]:
    return {schema[name] for name in ("exclusiveMinimum", "exclusiveMaximum") if name in schema}


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference!r}: only references inside the schema are followed")
    found = root
    for part in reference.lstrip("#/").split("/") if reference != "#" else ():
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found
