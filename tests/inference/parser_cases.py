"""Checks that the tests of all tool-call formats make of one text."""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.inference.tool_parsers import PARSERS, ParsedAnswer

Calls = list[tuple[str, Any]]


def read_calls(answer: ParsedAnswer) -> Calls:
    """Name and arguments of each call; of a malformed one its error."""
    return [(call.name, json.loads(call.arguments) if call.error is None else call.error) for call in answer.calls]


def assert_parsed(
    parser: str, text: str, tools: Sequence[dict[str, Any]], content: str, reasoning: str | None, calls: Calls
) -> None:
    """The text has these parts."""
    answer = PARSERS[parser].parse(text, tools)
    assert read_calls(answer) == calls
    assert (answer.content, answer.reasoning) == (content, reasoning)


def assert_malformed(parser: str, text: str, tools: Sequence[dict[str, Any]], name: str, error: str) -> None:
    """The text is one malformed call, whose error is a short line and whose words are kept."""
    (call,) = PARSERS[parser].parse(text, tools).calls
    assert call.name == name and call.arguments in text
    assert call.error is not None and error in call.error and "\n" not in call.error and len(call.error) < 300
