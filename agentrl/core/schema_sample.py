"""Random JSON values that fit a JSON schema.

Guarantees: the value depends on the generator alone; objects have their required properties and any of the others;
depth is bounded, so that recursive schemas end. Of ``pattern``, ``format``, ``not`` and the other keywords that only
exclude, nothing is known here: the caller validates what comes out.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAX_DEPTH = 6  # of nested values; below it only what is required
_LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
_SPREAD = 100  # numbers without bounds lie within this of 0, or of the one bound


def sample_json(schema: Any, rng: "np.random.Generator") -> Any:
    """A value that fits ``schema``, a JSON schema (draft 2020-12) with local ``$ref`` only."""
    return _sample(schema, rng, schema, 0)


def _sample(schema: Any, rng: "np.random.Generator", root: Any, depth: int) -> Any:
    if not isinstance(schema, dict):
        return None  # the schema ``true``
    if "$ref" in schema:
        return _sample(_resolve(schema["$ref"], root), rng, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            branches = schema[word]
            if depth >= MAX_DEPTH:  # the shallow ones end a recursion
                branches = [b for b in branches if not {"$ref", "properties", "items"} & set(b)] or branches
            rest = {key: value for key, value in schema.items() if key != word}
            return _sample(rest | branches[int(rng.integers(len(branches)))], rng, root, depth)
    if "allOf" in schema:
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            merged |= _resolve(part["$ref"], root) if "$ref" in part else part
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
        return fixed + [_sample(schema.get("items", {}), rng, root, depth + 1) for _ in range(count)]
    if kind == "string":
        least = schema.get("minLength", 0)
        length = int(rng.integers(least, min(schema.get("maxLength", least + 12), least + 12) + 1))
        return "".join(_LETTERS[int(i)] for i in rng.integers(len(_LETTERS), size=length))
    if kind == "integer":
        low, high = _bounds(schema, 1)
        step = int(schema.get("multipleOf", 1))
        first = -(-int(low) // step)
        return step * int(rng.integers(first, max(int(high) // step, first) + 1))
    if kind == "number":
        low, high = _bounds(schema, 1e-3)
        return round(float(rng.uniform(low, high)), 3) if high - low > 1e-2 else float(low)
    return bool(rng.integers(2)) if kind == "boolean" else None


def _object(schema: dict[str, Any], rng: "np.random.Generator", root: Any, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    found: dict[str, Any] = {}
    for name in [*properties, *(name for name in required if name not in properties)]:
        if name in required or (depth < MAX_DEPTH and rng.random() < 0.5):
            found[name] = _sample(properties.get(name, {}), rng, root, depth + 1)
    return found


def _bounds(schema: dict[str, Any], open_step: float) -> tuple[float, float]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        low = max(schema["exclusiveMinimum"] + open_step, low if low is not None else -float("inf"))
    if "exclusiveMaximum" in schema:
        high = min(schema["exclusiveMaximum"] - open_step, high if high is not None else float("inf"))
    if low is None:
        low = -_SPREAD if high is None else high - _SPREAD
    return low, low + _SPREAD if high is None else high


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference!r}: only references inside the schema are followed")
    found = root
    for part in reference.lstrip("#/").split("/") if reference != "#" else ():
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found
