"""Text that UTF-8 cannot hold, and text that a terminal would obey."""

import json
import random

import pytest

from agentrl.core.valid_text import printable, valid_data, valid_text

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain", "plain"),
        ("café 😀 \u2028 \x00", "café 😀 \u2028 \x00"),
        (HALF, "\ufffd"),
        (f"a{HALF}b", "a\ufffdb"),
        ("\ude00", "\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        (f"😀{HALF}", "😀\ufffd"),
        ("\udcff", "\ufffd"),  # a byte of a file name, as os.fsdecode keeps it
    ],
)
def test_half_a_surrogate_pair_is_replaced_and_two_halves_are_joined(given: str, expected: str) -> None:
    assert valid_text(given) == expected
    valid_text(given).encode()


def test_any_text_can_be_encoded_afterwards_and_valid_text_is_the_same_object() -> None:
    draw = random.Random(0)
    alphabet = ["a", "é", "😀", "\ud83d", "\ude00", "\udfff", "\x00", "\u2028", "\ufeff"]
    for _ in range(2000):
        text = "".join(draw.choices(alphabet, k=draw.randrange(8)))
        found = valid_text(text)
        found.encode()
        try:
            text.encode()
        except UnicodeEncodeError:
            continue
        assert found is text


def test_data_is_searched_through_and_what_is_valid_stays_the_same_object() -> None:
    marker = object()
    given = {HALF: [1, ("x", f"{HALF}y"), {"k": {HALF: None}}], "o": marker}
    found = valid_data(given)
    assert found == {"\ufffd": [1, ("x", "\ufffdy"), {"k": {"\ufffd": None}}], "o": marker}
    json.dumps({**found, "o": None}, ensure_ascii=False).encode()
    assert valid_data({"a": {HALF: 1}}) == {"a": {"\ufffd": 1}}
    valid = {"a": [1, {"b": ("c",)}], "d": marker}
    assert valid_data(valid) is valid


def test_a_terminal_is_not_told_anything() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    shown = printable(f"\x1b]0;title\x07\x1b[2J\r\x00\x9b1m {HALF} \u202e\u2028é")
    assert shown == "\\x1b]0;title\\x07\\x1b[2J\\r\\x00\\x9b1m \ufffd \\u202e\\u2028é"
