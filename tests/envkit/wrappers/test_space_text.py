"""Spaces in words and text back into elements."""

import json
import string
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example as case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envkit.wrappers.space_text import (
    ParseError,
    UnsupportedSpaceError,
    check_names,
    check_space,
    describe_space,
    describe_value,
    example,
    parse_value,
    to_json,
)

LAKE = ("left", "down", "right", "up")
SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "from -2": spaces.Discrete(5, start=-2),
    "multi": spaces.MultiDiscrete([3, 4]),
    "multi from": spaces.MultiDiscrete([[3, 4], [2, 2]], start=[[-1, 0], [5, 5]]),
    "binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,)),
    "box free": spaces.Box(-np.inf, np.inf, (2, 2), dtype=np.float64),
    "box half": spaces.Box(np.array([0.1, -np.inf], np.float32), np.array([np.inf, 0.7], np.float32)),
    "box one": spaces.Box(0, 5, ()),
    "box whole": spaces.Box(0, 255, (3,), dtype=np.uint8),
    "text": spaces.Text(5),
    "text any": spaces.Text(8, min_length=2, charset=string.printable + "é"),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.Text(3))),
    "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.MultiBinary(2),))}),
}
each = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)

FRAGMENTS = (
    *(
        "<action>",
        "</action>",
        "<ACTION>",
        "[",
        "]",
        "{",
        "}",
        '"a"',
        '"b"',
        ":",
        ",",
        "1",
        "-2",
        "0.5",
        "1e999",
        "NaN",
    ),
    *("Infinity", "left", "up", "\n", " ", "```", "null", "true", '"', "\\", "\ud800", "٣", "²"),
    *("9" * 5000, "[" * 3000),
)
parts = st.lists(st.sampled_from(FRAGMENTS), max_size=12)
texts = st.one_of(st.text(), parts.map("".join), parts.map(" ".join))


@settings(max_examples=60, deadline=None)
@given(text=texts)
@case(text="[" * 4000)
@case(text="<action>" * 500)
@case(text="1 " * 2000 + "x")
@case(text="9" * 4000 + "x")
@case(text='{"a": 1, "b": [[1, 0]]}')
@case(text="<action>1e308, 1e308, 1, 1</action>")
def test_any_text_is_an_element_or_a_parse_error(text: str) -> None:
    for space in SPACES.values():
        for names in (None, LAKE) if space is SPACES["discrete"] else (None,):
            try:
                assert space.contains(parse_value(space, text, names))
            except ParseError as error:
                assert len(str(error)) < 1000


@each
def test_what_is_written_is_read_back(space: spaces.Space[Any]) -> None:
    space.seed(3)
    for _ in range(20):
        element = space.sample()
        data = to_json(space, element)
        said = data if isinstance(data, str) else json.dumps(data)
        if said != said.strip():
            continue  # a text of the space that begins or ends with a blank
        back = parse_value(space, f"So:\n<action>{said}</action>")
        assert json.dumps(to_json(space, back)) == json.dumps(data)
        assert describe_value(space, element) or data == ""


@each
def test_the_example_is_an_element(space: spaces.Space[Any]) -> None:
    check_space(space)
    assert space.contains(parse_value(space, f"<action>{example(space)}</action>"))
    assert describe_space(space)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<action>right</action>", 2),
        ("<action> 3 </action> I think", 3),
        ("<action>left</action> no, <ACTION>'Up'</ACTION>", 3),
        ("<action>down", 1),
        ("I go **Down**.", 1),
        ("The answer is: left", 0),
        ("Action 2", 2),
        ("right\n```", 2),
        ("to the left-\nUP!", 3),
    ],
)
def test_a_named_action_is_read(text: str, want: int) -> None:
    assert parse_value(spaces.Discrete(4), text, LAKE) == want


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go left now",
        "<action>go left</action>",
        "<action></action>",
        "4",
        "-1",
        "1.5",
        "leftup",
        "left2",
        "1e0",
        "²",
    ],
)
def test_what_is_not_exactly_an_action_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_value(spaces.Discrete(4), text, LAKE)


def test_names_of_several_words_are_read_without_a_tag() -> None:
    space, names = spaces.Discrete(3), ("left", "turn left", "pick_up")
    assert parse_value(space, "I will turn left", names) == 1
    assert parse_value(space, "I go left", names) == 0
    assert parse_value(space, "now pick up!", names) == parse_value(space, "<action>Pickup</action>", names) == 2


def test_a_name_that_is_a_number_is_a_name() -> None:
    assert parse_value(spaces.Discrete(2), "I bet 1", ("1", "0")) == 0


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("box", "I choose [0.5, -1]", [0.5, -1.0]),
        ("box", "x and y: 0.5, -0.25", [0.5, -0.25]),
        ("box", "<action>[0.5 0]</action>", [0.5, 0.0]),
        ("box half", "<action>0.1, 0.7</action>", [0.1, 0.7]),
        ("box one", "the 4.5", 4.5),
        ("multi", "```json\n[2, 3]\n```", [2, 3]),
        ("multi from", "[1, 3, 6, 5]", [[1, 3], [6, 5]]),
    ],
)
def test_numbers_are_read(name: str, text: str, want: Any) -> None:
    assert parse_value(SPACES[name], text).tolist() == pytest.approx(np.array(want))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("box", "[0.5, 1.01]", "not a number from -1 to 1"),
        ("box", "[0.5]", "want 2 numbers, got 1"),
        ("box free", "[1, 2, 3, NaN]", "not a number"),
        ("box whole", "[1, 2, 0.5]", "not a whole number from 0 to 255"),
        ("box whole", "[1, 2, true]", "not a whole number"),
        ("multi", "[2, 4]", "not a whole number from 0 to 3"),
        ("tuple", "[1, [0, 1]]", "want a JSON list of 3"),
        ("dict", '{"a": 1}', "want a JSON object with exactly a, b"),
        ("dict", "a: 1", "want a JSON object with exactly a, b"),
        ("text", "too long for it", "a text of 1 to 5 characters"),
    ],
)
def test_a_refusal_says_what_is_allowed(name: str, text: str, why: str) -> None:
    with pytest.raises(ParseError, match=why):
        parse_value(SPACES[name], text)


def test_spaces_in_words() -> None:
    assert describe_space(spaces.Discrete(2), ("stick", "hit")) == "one of: stick, hit"
    assert describe_space(SPACES["from -2"]) == "a whole number from -2 to 2"
    assert describe_space(SPACES["box"]) == "a JSON list of 2 numbers, each from -1 to 1"
    assert describe_space(SPACES["box half"]) == "a JSON list of 2 numbers: of at least 0.1; of at most 0.7"
    assert describe_space(SPACES["box free"]) == "a JSON list of 4 numbers (shape 2 x 2, row by row)"
    assert describe_space(SPACES["multi"]) == "a JSON list of 2 whole numbers: from 0 to 2; from 0 to 3"


def test_values_in_words() -> None:
    assert describe_value(spaces.Discrete(4), 1, LAKE) == "down"
    assert describe_value(SPACES["box"], np.array([1 / 3, -1], np.float32)) == "[0.3333, -1.0]"
    assert describe_value(SPACES["dict"], {"a": 1, "b": (np.array([1, 0]),)}) == "a: 1\nb: [[1, 0]]"


@pytest.mark.parametrize("space", [spaces.Box(0, 255, (8, 9)), spaces.Sequence(spaces.Discrete(2))])
def test_spaces_that_no_text_can_tell_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpaceError, match=r"too many for text|cannot be told in text"):
        check_space(space)
    with pytest.raises(UnsupportedSpaceError):
        check_space(spaces.Dict({"a": space}))


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("pick up", "PickUp"), ("a", " ")])
def test_names_that_are_not_one_for_each_action_are_errors(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="action_names"):
        check_names(spaces.Discrete(2), names)
