"""What a function takes, as a JSON schema, and the functions that cannot be described."""

import functools
import json
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from agentrl.envkit.tools.tool import Tool

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeChecking


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Page(BaseModel):
    title: str
    number: int = 1


@dataclass
class Point:
    x: int
    y: int = 0


def nothing() -> None: ...
def plain(a: int, b: str = "x", c: bool = False, d: float = 0.5) -> None: ...
def choice(mode: Literal["fast", "slow"], color: Color = Color.RED) -> None: ...
def maybe(a: int | None = None, b: Optional[str] = None) -> None: ...  # noqa: UP045 the older spelling works too
def many(names: list[str], table: dict[str, int]) -> None: ...
def bounded(n: Annotated[int, Field(ge=1, le=9, description="How many.")]) -> None: ...
def nested(page: Page, point: Point) -> None: ...
def reserved(json: int, model_config: int, _x: int, self: int, copy: int = 3) -> None: ...
def quoted(a: "int", b: "list['Point'] | None" = None) -> "OnlyForTypeChecking": ...  # type: ignore


INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
POINT = {
    "type": "object",
    "properties": {"x": INT, "y": INT | {"default": 0}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMAS: list[tuple[Any, dict[str, Any]]] = [
    (nothing, {"properties": {}}),
    (
        plain,
        {
            "properties": {
                "a": INT,
                "b": STR | {"default": "x"},
                "c": {"type": "boolean", "default": False},
                "d": {"type": "number", "default": 0.5},
            },
            "required": ["a"],
        },
    ),
    (
        choice,
        {
            "properties": {
                "mode": STR | {"enum": ["fast", "slow"]},
                "color": {"$ref": "#/$defs/Color", "default": "red"},
            },
            "required": ["mode"],
            "$defs": {"Color": STR | {"enum": ["red", "blue"]}},
        },
    ),
    (
        maybe,
        {
            "properties": {
                "a": {"anyOf": [INT, NULL], "default": None},
                "b": {"anyOf": [STR, NULL], "default": None},
            }
        },
    ),
    (
        many,
        {
            "properties": {
                "names": {"type": "array", "items": STR},
                "table": {"type": "object", "additionalProperties": INT},
            },
            "required": ["names", "table"],
        },
    ),
    (
        bounded,
        {"properties": {"n": INT | {"minimum": 1, "maximum": 9, "description": "How many."}}, "required": ["n"]},
    ),
    (
        nested,
        {
            "properties": {"page": {"$ref": "#/$defs/Page"}, "point": {"$ref": "#/$defs/Point"}},
            "required": ["page", "point"],
            "$defs": {
                "Page": {
                    "type": "object",
                    "properties": {"title": STR, "number": INT | {"default": 1}},
                    "required": ["title"],
                },
                "Point": POINT,
            },
        },
    ),
    (
        reserved,
        {
            "properties": {"json": INT, "model_config": INT, "_x": INT, "self": INT, "copy": INT | {"default": 3}},
            "required": ["json", "model_config", "_x", "self"],
        },
    ),
    (
        quoted,
        {
            "properties": {
                "a": INT,
                "b": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Point"}}, NULL], "default": None},
            },
            "required": ["a"],
            "$defs": {"Point": POINT},
        },
    ),
]


@pytest.mark.parametrize(("function", "want"), SCHEMAS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_schema_is_what_the_signature_says(function: Any, want: dict[str, Any]) -> None:
    got = Tool.from_function(function).schema()
    parameters = {"type": "object", "additionalProperties": False} | want
    assert got == {
        "type": "function",
        "function": {"name": function.__name__, "description": "", "parameters": parameters},
    }
    json.dumps(got, allow_nan=False)


def test_a_changed_schema_does_not_reach_the_tool() -> None:
    made = Tool.from_function(plain)
    made.schema()["function"]["parameters"]["properties"].clear()
    assert "a" in made.schema()["function"]["parameters"]["properties"]


def test_the_docstring_describes_the_tool_and_its_parameters() -> None:
    def search(
        query: str, limit: int = 3, point: Point | None = None, page: Annotated[int, Field(description="P")] = 0
    ):
        """Search the pages.

        Best first.

        Args:
            query: What to look for; a word: or
                two.
            limit (int, optional): At most so many.

            point: Where.
            page: Not this: the type hint says it already.

        Returns:
            limit: this is no parameter line.
        """

    made = Tool.from_function(search, name="find")
    assert (made.name, made.description) == ("find", "Search the pages.\n\nBest first.")
    texts = {name: schema["description"] for name, schema in made.parameters["properties"].items()}
    assert texts == {
        "query": "What to look for; a word: or two.",
        "limit": "At most so many.",
        "point": "Where.",
        "page": "P",
    }


class Box:
    def method(self, a: int) -> int:
        return a

    def unhinted(self, a) -> None: ...


def any_number(*values: int) -> None: ...
def any_names(**values: int) -> None: ...
def by_position(a: int, /) -> None: ...
def no_hint(a, b: int) -> None: ...
def unsupported(a: Box) -> None: ...
def half_supported(a: int | Box) -> None: ...
def unresolved(a: "OnlyForTypeChecking") -> None: ...
def wrong_pattern(a: Annotated[str, Field(pattern="(")]) -> None: ...
def field_default(a: int = Field(ge=1)) -> None: ...
def endless(a: float = float("inf")) -> None: ...
def odd_default(a: Any = Box()) -> None: ...  # noqa: B008 a default without a JSON form is the point


def yields(a: int):
    yield a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (any_number, ["any_number", "'values'", "named parameter"]),
        (any_names, ["any_names", "'values'", "named parameter"]),
        (by_position, ["by_position", "'a'", "'/'"]),
        (no_hint, ["no_hint", "'a'", "no type hint", "name: str"]),
        (Box().unhinted, ["Box.unhinted", "'a'", "no type hint"]),
        (Box.method, ["Box.method", "'self'", "bound method"]),
        (unsupported, ["unsupported", "'a'", "Box", "dataclass"]),
        (half_supported, ["half_supported", "'a'", "Box"]),
        (unresolved, ["unresolved", "'a'", "OnlyForTypeChecking", "top of the module"]),
        (wrong_pattern, ["wrong_pattern", "'a'", "regex"]),
        (field_default, ["field_default", "'a'", "Annotated"]),
        (endless, ["endless", "'a'", "JSON"]),
        (odd_default, ["odd_default", "'a'", "JSON"]),
        (yields, ["yields", "list"]),
        (Box, ["Box", "wrap it"]),
        (functools.partial(plain, a=1), ["partial", "wrap it"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_described_is_an_error_that_says_how_to_mend_it(function: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        Tool.from_function(function)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_name_that_the_api_refuses_is_an_error() -> None:
    with pytest.raises(ValueError, match="tool name 'a b'"):
        Tool.from_function(plain, name="a b")
    with pytest.raises(ValueError, match="lambda"):
        Tool.from_function(lambda: None)


def test_an_example_in_the_docstring_belongs_to_the_description() -> None:
    def search(query: str) -> None:
        """Search.

        Example:
            search(query="red")

        Args:
            query: Words.
        """

    assert Tool.from_function(search).description == 'Search.\n\nExample:\n    search(query="red")'


def test_an_args_section_that_names_no_parameter_is_an_error() -> None:
    def search(query: str) -> None:
        """Search.

        Args:
            the words to look for
        """

    with pytest.raises(TypeError, match=r"search': the docstring's Args section.*the words to look for"):
        Tool.from_function(search)


def test_a_docstring_that_describes_no_parameter_of_the_function_is_an_error() -> None:
    def search(query: str) -> None:
        """Search.

        Args:
            qury: What.
        """

    with pytest.raises(TypeError, match="'qury', which is no parameter, did you mean 'query'"):
        Tool.from_function(search)
