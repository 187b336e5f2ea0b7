"""Builds the JSON schema of a function's arguments from its signature, type hints and docstring.

Guarantees: the JSON schema and the validation come from one pydantic model, so they cannot differ; the schema is plain
JSON without pydantic's titles; a function that cannot be described without guessing raises a ``TypeError`` that names
the function and the parameter and says how to fix it.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints
from weakref import WeakKeyDictionary

from docstring_parser import ParseError
from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import SchemaError

from agentrl.core.registry import nearest

# Sections left out of the description; others, such as Example, stay in it for the model.
_SECTIONS = {"Args", "Arguments", "Returns", "Raises", "Yields"}
_PARSER = GoogleParser([section for section in DEFAULT_SECTIONS if section.title in _SECTIONS])
_VERBATIM = {"default", "const", "enum", "examples", "discriminator"}  # keywords that hold values, not schemas
_NAMED = {"properties", "$defs"}  # keywords that hold schemas under arbitrary names


@dataclass(frozen=True)
class Contract:
    """A function's arguments: their schema and their validation.

    Attributes:
        description: The docstring up to its first section.
        parameters: JSON schema of an object with the arguments.
        model: Pydantic model that validates the arguments.
        names: Maps field names of ``model`` to parameter names.
        optional: Names of the parameters that have a default.
    """

    description: str
    parameters: dict[str, Any]
    model: type[BaseModel]
    names: dict[str, str]
    optional: frozenset[str]


# Cached: each episode makes an environment, and a contract costs a millisecond. Keys: the function, then "is bound".
_KNOWN: WeakKeyDictionary[Callable[..., Any], dict[bool, Contract]] = WeakKeyDictionary()


def contract_of(function: Callable[..., Any]) -> Contract:
    """Returns the contract of a function or bound method.

    Raises:
        TypeError: The function cannot be described; the message says why.
    """
    if not inspect.isroutine(function):
        raise TypeError(f"{function!r} is no function or bound method; wrap it in one")
    known = _KNOWN.setdefault(getattr(function, "__func__", function), {})
    bound = inspect.ismethod(function)
    if bound not in known:
        known[bound] = _read(function)
    return known[bound]


def _read(function: Callable[..., Any]) -> Contract:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{_label(function)} yields; a tool returns its result, as a list for example")
    description, described = _described(function)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    optional: set[str] = set()
    for position, parameter in enumerate(_signature(function)):
        hint = _checked_hint(function, parameter, first=position == 0)
        default = ... if parameter.default is parameter.empty else parameter.default
        if default is not ...:
            optional.add(parameter.name)
        # Neutral field names: a parameter may be called json, model_config or _x, which pydantic reserves.
        field = f"p{position}"
        names[field] = parameter.name
        fields[field] = (hint, Field(default, alias=parameter.name, validation_alias=parameter.name))
    for name in described:
        if name not in names.values():
            closest = nearest(name, list(names.values()))
            raise TypeError(f"{_label(function)}: the docstring describes {name!r}, which is no parameter{closest}")
    model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    parameters = without_titles(model.model_json_schema(schema_generator=_StrictSchema))
    for name, text in described.items():
        parameters["properties"][name].setdefault("description", text)
    return Contract(description, parameters, model, names, frozenset(optional))


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, NameError) as error:  # built without a signature; from Python 3.14 a name that is not defined
        raise TypeError(f"{_label(function)} has no signature to read: {error}; wrap it in a function") from error


def _checked_hint(function: Callable[..., Any], parameter: inspect.Parameter, *, first: bool) -> Any:
    """Returns a parameter's type after checking that it has a JSON schema."""
    where = f"{_label(function)}: parameter {parameter.name!r}"
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
        raise TypeError(f"{where} takes any number of arguments; give each one a named parameter")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise TypeError(f"{where} is positional-only, tools are called by name; take the '/' out of the signature")
    if parameter.annotation is parameter.empty:
        unbound = first and parameter.name in {"self", "cls"}
        mend = "pass the bound method" if unbound else "write one, as in 'name: str'"
        raise TypeError(f"{where} has no type hint; {mend}")
    if isinstance(parameter.default, FieldInfo):
        raise TypeError(f"{where} has Field(...) as its default; write Annotated[type, Field(...)] and a plain default")
    hint = _evaluated(where, function, parameter)
    try:
        # Includes the default, so that one that is not JSON raises here, where the parameter is known.
        full: Any = hint if parameter.default is parameter.empty else Annotated[hint, Field(default=parameter.default)]
        json.dumps(TypeAdapter(full).json_schema(schema_generator=_StrictSchema), allow_nan=False)
    except (PydanticUserError, PydanticUndefinedAnnotation, SchemaError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        if not isinstance(error, SchemaError):
            text = text.split(". ")[0]  # the rest is advice about pydantic, not about the tool
        raise TypeError(
            f"{where}: no JSON schema for {hint!r} or its default: {text}; "
            f"use a JSON type, a dataclass, a pydantic model, an Enum or a Literal"
        ) from error
    return hint


def _evaluated(where: str, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Evaluates a parameter's type hint if it is a string; the return hint is not evaluated."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)[parameter.name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise TypeError(
            f"{where}: type hint {parameter.annotation!r} cannot be resolved: {error}; "
            f"define or import its names at the top of the module"
        ) from error


def _label(function: Callable[..., Any]) -> str:
    return f"tool function {getattr(function, '__qualname__', function)!r}"


class _StrictSchema(GenerateJsonSchema):
    """Schema generator that raises where pydantic would warn and omit a part of the schema."""

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        raise PydanticInvalidForJsonSchema(detail)


def without_titles(schema: Any) -> Any:
    """Removes ``title`` keywords from a JSON schema; a property named ``title`` stays."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED:
            kept[key] = {name: without_titles(part) for name, part in value.items()}
        elif key != "title":
            kept[key] = value if key in _VERBATIM else without_titles(value)
    return kept


def _described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns the docstring's description of the tool, and of each parameter under ``Args:``."""
    try:
        found = _PARSER.parse(inspect.getdoc(function) or "")
    except ParseError as error:
        raise TypeError(
            f"{_label(function)}: the docstring's Args section is not 'name: text' lines: {error}"
        ) from error
    return (found.description or "").strip(), {
        part.arg_name: " ".join((part.description or "").split()) for part in found.params
    }
