"""Spaces of messages and tool calls, held to Gymnasium's own expectations of a space."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envkit.spaces.messages import MessageListSpace, MessageSpace, ToolCallSpace
from agentrl.envkit.tools.tool import Tool


def weigh(name: str, grams: int, tags: list[str] | None = None, exact: bool = False, scale: float = 1.0) -> int:
    """Weigh something."""
    return grams


def find(query: str, kind: Any = None) -> str:
    return query


WEIGH = Tool.from_function(weigh).schema()
BOUNDED = {
    "type": "function",
    "function": {
        "name": "bounded",
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 3, "exclusiveMaximum": 9, "multipleOf": 2},
                "x": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "mode": {"enum": ["a", "b"]},
                "tree": {"$ref": "#/$defs/tree"},
                "either": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 2}]},
                "pair": {
                    "type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "minItems": 2, "items": False,
                },
            },
            "required": ["n", "x", "mode", "tree", "either", "pair"],
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                    "required": ["children"],
                }
            },
        },
    },
}  # fmt: skip
SPACES = [
    ToolCallSpace([WEIGH, BOUNDED]),
    MessageSpace(),
    MessageSpace(("system", "user", "tool")),
    MessageSpace(tools=[WEIGH]),
    MessageListSpace(),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_samples_are_contained_depend_on_the_seed_and_survive_json_and_pickle(space: Any) -> None:
    space.seed(3)
    samples = [space.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    space.seed(3)
    assert [space.sample() for _ in range(200)] == samples
    space.seed(4)
    assert [space.sample() for _ in range(200)] != samples
    text = json.dumps(space.to_jsonable(samples))
    assert space.from_jsonable(json.loads(text)) == samples
    again = pickle.loads(pickle.dumps(space))
    assert again == space and all(sample in again for sample in samples)


def test_equality_is_of_what_they_contain() -> None:
    assert ToolCallSpace([WEIGH], seed=1) == ToolCallSpace([WEIGH], seed=2)
    assert ToolCallSpace([WEIGH]) != ToolCallSpace([WEIGH, BOUNDED])
    assert MessageSpace(tools=[WEIGH]) != MessageSpace()
    assert MessageSpace(("user",)) != MessageSpace(("assistant",))
    assert MessageListSpace() == MessageListSpace()
    assert MessageListSpace(MessageSpace()) != MessageListSpace()
    assert MessageSpace() != MessageListSpace()


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "inside"),
    [
        ('{"name": "x", "grams": 3}', True),
        ('{"name": "x", "grams": "3"}', False),
        ('{"name": "x"}', False),
        ('{"name": "x", "grams": 3, "more": 1}', False),
        ('{"name": "x", "grams": 3', False),
        ("[]", False),
        ({"name": "x", "grams": 3}, False),
    ],
)
def test_a_call_is_inside_where_its_arguments_fit_the_schema(arguments: Any, inside: bool) -> None:
    space = ToolCallSpace([WEIGH])
    assert (call("weigh", arguments) in space) is inside
    message = {"role": "assistant", "content": None, "tool_calls": [call("weigh", arguments)]}
    assert (message in MessageSpace(tools=[WEIGH])) is inside


@pytest.mark.parametrize(
    ("message", "inside"),
    [
        ({"role": "assistant", "content": "x"}, True),
        ({"role": "assistant", "content": None}, False),
        ({"role": "user", "content": "x"}, False),
        ({"role": "assistant", "content": 3}, False),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, True),
        ({"role": "assistant", "content": "x", "tool_calls": [call("weigh", "{}")]}, False),
        ({"content": "x"}, False),
        ("x", False),
    ],
)
def test_a_message_is_inside_where_a_chat_api_would_take_it(message: Any, inside: bool) -> None:
    assert (message in MessageSpace()) is inside


def test_the_samples_of_bounds_reach_all_of_them() -> None:
    space = ToolCallSpace([BOUNDED], seed=0)
    found = [json.loads(space.sample()["function"]["arguments"]) for _ in range(200)]
    assert {value["n"] for value in found} == {4, 6, 8}
    assert {value["mode"] for value in found} == {"a", "b"}
    assert {value["either"] is None for value in found} == {True, False}


SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0.5, "maximum": 2.5},
    {"type": "integer", "minimum": 10**20, "maximum": 10**21},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.0005},
    {"type": "number", "minimum": -1e300, "maximum": 1e300},
    {"type": "number", "minimum": 2, "maximum": 2},
    {"type": "number", "multipleOf": 0.5, "minimum": 0.2, "maximum": 3},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "object", "properties": {n: {"type": "string"} for n in "abcd"}, "minProperties": 3},
    {"oneOf": [{"type": "integer"}, {"type": "number"}, {"type": "string"}]},
    {"not": {"type": "string", "maxLength": 3}, "type": "string"},
    {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_schemas_of_all_kinds_are_sampled(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    space = ToolCallSpace([{"type": "function", "function": {"name": "f", "parameters": parameters}}], seed=0)
    assert all(space.sample() in space for _ in range(100))


def test_a_schema_without_an_end_is_an_error() -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}}
    with pytest.raises(ValueError, match="infinitely nested"):
        ToolCallSpace([{"type": "function", "function": {"name": "f", "parameters": endless}}]).sample()


def test_what_cannot_be_sampled_or_is_no_schema_is_an_error() -> None:
    pattern = call("p", "")["function"] | {
        "name": "p", "parameters": {"properties": {"x": {"type": "string", "pattern": "^q{9}$"}}, "required": ["x"]},
    }  # fmt: skip
    with pytest.raises(ValueError, match="cannot sample arguments of tool 'p'"):
        ToolCallSpace([{"type": "function", "function": pattern}]).sample()
    with pytest.raises(ValueError, match="no JSON schema"):
        ToolCallSpace([{"type": "function", "function": {"name": "q", "parameters": {"type": "nothing"}}}])
    with pytest.raises(ValueError, match="at least one tool"):
        ToolCallSpace([])
    with pytest.raises(ValueError, match="roles"):
        MessageSpace(("robot",))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_value_can_be_asked_about(value: Any) -> None:
    for space in SPACES:
        assert isinstance(value in space, bool)
    assert isinstance({"role": "assistant", "content": value, "tool_calls": value} in SPACES[3], bool)
