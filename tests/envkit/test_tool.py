"""Python functions as tools: arguments from JSON, calls, and the tools of an object."""

import functools
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.envkit.tools.tool import Tool, ToolArgumentError, UnparsableArgumentsError, collect_tools, tool


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Page(BaseModel):
    title: str


@dataclass
class Point:
    x: int


def nothing() -> None: ...
def plain(a: int, b: str = "x", c: bool = False, d: float = 0.5) -> None: ...
def choice(mode: Literal["fast", "slow"], color: Color = Color.RED) -> None: ...
def maybe(a: int | None = None) -> None: ...
def many(names: list[str], table: dict[str, int]) -> None: ...
def pair(both: tuple[int, str]) -> None: ...
def bounded(n: Annotated[int, Field(ge=1)]) -> None: ...
def strict(n: Annotated[int, Field(strict=True)]) -> None: ...
def nested(page: Page, point: Point) -> None: ...
def reserved(json: int, model_config: int, _x: int, self: int, copy: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("function", "text", "want"),
    [
        (plain, '{"a": 1}', {"a": 1}),
        (plain, '{"a": "5", "d": 2, "b": "y"}', {"a": 5, "b": "y", "d": 2.0}),
        (choice, '{"mode": "slow", "color": "blue"}', {"mode": "slow", "color": Color.BLUE}),
        (maybe, '{"a": null}', {"a": None}),
        (
            nested,
            '{"page": {"title": "t"}, "point": {"x": 1}}',
            {"page": Page(title="t"), "point": Point(1)},
        ),
        (
            reserved,
            '{"json": 1, "model_config": 2, "_x": 3, "self": 4}',
            {"json": 1, "model_config": 2, "_x": 3, "self": 4},
        ),
        (nothing, "{}", {}),
        (nothing, " ", {}),
        (maybe, "", {}),
    ],
)
def test_arguments_come_as_the_annotated_types(function: Any, text: str, want: dict[str, Any]) -> None:
    assert Tool.from_function(function).parse(text) == want


@pytest.mark.parametrize(
    ("function", "text", "line"),
    [
        (
            plain,
            '{"a": "five"}',
            'plain: argument "a": Input should be a valid integer, unable to parse string as an integer, got "five" '
            "(required: a; optional: b, c, d)",
        ),
        (plain, "{}", 'plain: argument "a": is missing (required: a; optional: b, c, d)'),
        (plain, '{"a": 1, "b": 5}', 'argument "b": Input should be a valid string, got 5'),
        (nothing, '{"a": 1}', 'nothing: argument "a": is not known (it takes no arguments)'),
        (many, '{"nmes": [], "table": {}}', "did you mean 'names'?"),
        (
            many,
            '{"names": ["a", 2], "table": {"k": "v\\n\\u2028"}}',
            'argument "names[1]": Input should be a valid str',
        ),
        (many, '{"names": [], "table": {"k": "v\\n\\u2028"}}', r'got "v\n\u2028"'),
        (choice, '{"mode": "quick"}', """Input should be 'fast' or 'slow', got "quick\""""),
        (choice, '{"mode": "fast", "color": "pink"}', "Input should be 'red' or 'blue', got \"pink\""),
        (strict, '{"n": "5"}', 'argument "n": Input should be a valid integer, got "5"'),
        (bounded, '{"n": 0}', "greater than or equal to 1, got 0"),
        (nested, '{"page": {}, "point": {"x": 1}}', 'argument "page.title": is missing'),
        (nested, '{"page": {"title": ""}, "point": {"x": 1, "z": 1}}', 'argument "point.z": is not known'),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(function: Any, text: str, line: str) -> None:
    with pytest.raises(ToolArgumentError) as caught:
        Tool.from_function(function).parse(text)
    assert not isinstance(caught.value, UnparsableArgumentsError)
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_branches_of_a_union_are_one_argument() -> None:
    def either(value: int | list[int]) -> None: ...

    with pytest.raises(ToolArgumentError, match=r'^either: argument "value": [^"]+ or [^"]+, got "x" \(') as caught:
        Tool.from_function(either).parse('{"value": "x"}')
    assert str(caught.value).count("argument") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "[]",
        '"{}"',
        "{'a': 1}",
        '{"a": 1',
        '{"a": 1} {}',
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": 1, "b": "\\ud800"}',
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        f'{{"a": {"9" * 5000}}}',
    ],
    ids=lambda text: text[:20],
)
def test_what_is_not_one_json_object_is_unparsable(text: str) -> None:
    with pytest.raises(UnparsableArgumentsError) as caught:
        Tool.from_function(plain).parse(text)
    assert len(str(caught.value).splitlines()) == 1


async def test_sync_functions_run_in_a_thread_and_async_ones_on_the_loop() -> None:
    async def on_loop() -> int:
        return threading.get_ident()

    def in_thread() -> int:
        return threading.get_ident()

    @functools.wraps(on_loop)
    def wrapped():
        return on_loop()

    here = threading.get_ident()
    assert await Tool.from_function(in_thread).call({}) != here
    assert await Tool.from_function(on_loop).call({}) == here
    assert await Tool.from_function(wrapped).call({}) == here, "a sync wrapper of an async function is awaited"


async def test_an_argument_left_out_keeps_the_function_s_own_default() -> None:
    sentinel: list[int] = []

    async def same(values: list[int] = sentinel) -> bool:
        return values is sentinel

    made = Tool.from_function(same)
    assert await made.call(made.parse("{}")) is True


class Base:
    def helper(self) -> None: ...

    @tool
    def first(self, a: int) -> str:
        """First."""
        return f"base {a}"

    @tool(name="second-tool", timeout=2.0)
    async def second(self) -> str:
        return "base second"

    @tool
    def third(self) -> None: ...


class Child(Base):
    third = None  # type: ignore[assignment]

    @tool
    @classmethod
    def fifth(cls) -> str:
        return cls.__name__

    @staticmethod
    @tool
    def fourth(a: int) -> int:
        return a

    def first(self, a: int, b: int = 0) -> str:
        return f"child {a} {b}"


async def test_the_tools_of_an_object_are_its_marked_methods_in_order() -> None:
    tools = collect_tools(Base())
    assert [one.name for one in tools] == ["first", "second-tool", "third"]
    assert [one.timeout for one in tools] == [None, 2.0, None]
    assert await tools[0].call({"a": 1}) == "base 1"
    assert Base().first(2) == "base 2", "a marked method stays a method"


async def test_an_overridden_tool_comes_once_and_keeps_its_place() -> None:
    tools = collect_tools(Child())
    assert [one.name for one in tools] == ["first", "second-tool", "fifth", "fourth"]
    first, _, fifth, _ = tools
    assert await first.call(first.parse('{"a": 1, "b": 2}')) == "child 1 2"
    assert first.description == "First.", "inherited, as inspect.getdoc does"
    assert await fifth.call({}) == "Child"


def test_two_tools_of_one_name_are_an_error() -> None:
    class Twice:
        @tool(name="same")
        def one(self) -> None: ...

        @tool(name="same")
        def two(self) -> None: ...

    with pytest.raises(ValueError, match="two tools are called 'same'"):
        collect_tools(Twice())


def test_a_mark_with_a_timeout_that_is_over_at_once_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        tool(timeout=0)


def test_importing_the_tools_imports_nothing_heavy() -> None:
    code = (
        "import sys, agentrl.envkit.tools.tool, agentrl.envkit.tools.tool_calls;"
        "print([name for name in ('torch', 'transformers', 'openai', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
