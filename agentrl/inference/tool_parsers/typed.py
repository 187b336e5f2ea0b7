"""Converts arguments that a format writes as plain text to the types of the tool's schema.

Guarantees: text stays unchanged if the schema says string; a value that fits no type of the schema is refused; without
a type in the schema, JSON is read as JSON, and any other text is a string.
"""

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.inference.tool_parsers.values import Malformed, kind, read_json, shown

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_PYTHON = {"True": True, "False": False, "None": None}  # templates print these three values in Python's spelling
_MAX_SCHEMAS = 100  # schemas followed for one parameter, because definitions may refer to each other in circles


def typed(text: str, schema: Mapping[str, Any], name: str, read: Callable[[str, str], Any] = read_json) -> Any:
    """Returns the value of an argument.

    Args:
        text: Text between the tags.
        schema: JSON schema of all arguments of the tool.
        name: Name of the argument.
        read: Function that reads a value that is not a string from its text, and takes the value's name for its error.

    Raises:
        Malformed: ``text`` is no value of the argument's types.
    """
    types = types_of(schema, name)
    if types == {"string"}:
        return text
    problem = ""
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else read(text, name)
    except Malformed as error:
        value, problem = text, f" ({error})" if text.lstrip().startswith(("{", "[")) else ""
    if isinstance(value, str):  # strings are written without quotes, so quotes belong to the value
        value = text
    if not types or _accepts(types, value):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if "string" in types:
        return text
    raise Malformed(f"parameter {shown(name)}: want {' or '.join(sorted(types))}, got {shown(text.strip())}{problem}")


def _accepts(types: set[str], value: Any) -> bool:
    found = kind(value)
    return found in types or (found == "integer" and "number" in types)


def types_of(schema: Mapping[str, Any], name: str) -> set[str]:
    """JSON types that a parameter may have; empty if the schema names none."""
    types: set[str] = set()
    for part in schemas_of(schema, name):
        found = _alternatives(part, schema)[1]
        if not found:
            return set()  # one of the alternatives takes anything
        types |= found
    return types


def schemas_of(schema: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Schemas of a parameter, with references followed: one for each alternative; empty if nothing is known of it.

    Args:
        schema: JSON schema of an object.
        name: Name of the parameter.
    """
    properties = schema.get("properties")
    waiting = [properties.get(name)] if isinstance(properties, Mapping) else []
    found: list[Mapping[str, Any]] = []
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            return found
        part = waiting.pop()
        if not isinstance(part, Mapping):
            return []
        more, _ = _alternatives(part, schema)
        if more:
            waiting += more
        else:
            found.append(part)
    return []


def _alternatives(part: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[list[Any], set[str]]:
    """Returns the schemas that this one refers to, and the types that it names itself."""
    declared = part.get("type")
    declared = declared if isinstance(declared, list) else [declared]
    types = {item for item in declared if isinstance(item, str)} & _TYPES
    if types:
        return [], types
    if isinstance(part.get("$ref"), str):
        return [_referred(part["$ref"], root)], set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(part.get(key), list):
            return list(part[key]), set()
    constants = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    return [], {kind(value) for value in constants}


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
