"""Text and bytes of any kind, for a terminal."""

import pytest

from agentrl.observe.shown_text import plain, quoted


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" a  b", "␣a␣␣b"),
        (b"\n\t\r", r"\n\t\r"),
        (rb"\n", r"\\n"),
        (b"\xf0\x9f", r"\xf0\x9f"),
        ("😀ü漢".encode(), "😀ü漢"),
        ("\u200b\u202e\x1b[2J".encode(), r"\u200b\u202e\x1b[2J"),
        (b"", ""),
    ],
)
def test_the_bytes_of_a_token_are_one_line_that_can_be_read_back(data: bytes, shown: str) -> None:
    assert quoted(data) == shown


def test_distinct_bytes_look_distinct() -> None:
    data = [bytes([a, b]) for a in range(256) for b in (10, 32, 65, 92, 110, 128, 240)]
    assert len(set(map(quoted, data))) == len(data)


def test_a_text_keeps_its_lines_and_loses_what_a_terminal_obeys() -> None:
    assert plain("a\n\tb \x1b[31m\x07\r\u202e") == "a\n\tb \\x1b[31m\\x07\\r\\u202e"
    assert plain("half \ud83d") == "half \\ud83d"
    plain("half \ud83d").encode()
