"""Odd answers of every parser: no exception, no call made up, no word lost or given twice.

An answer is put together from pieces of the format's own examples (marks, whole calls, cut calls), of other formats, of
JSON and of Unicode, and from words of which each occurs once.
"""

import json
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.inference.tool_parsers import PARSERS, ParsedAnswer, ParsedCall, ToolParser
from agentrl.inference.tool_parsers.answer import FormatParser
from tests.inference import (
    test_tool_parsers,
    test_tool_parsers_gemma_to_muse,
    test_tool_parsers_kimi_to_hunyuan,
    test_tool_parsers_m3_to_cohere,
)
from tests.inference.test_tool_parsers import TOOLS

ANSWERS = 100_000
FEW = 200
EXAMPLES: dict[str, list[str]] = {name: [] for name in PARSERS}
MODULES = (
    test_tool_parsers,
    test_tool_parsers_gemma_to_muse,
    test_tool_parsers_kimi_to_hunyuan,
    test_tool_parsers_m3_to_cohere,
)
for module in MODULES:
    for row in (*module.WELL_FORMED, *module.MALFORMED):
        if len(row[1]) < 600:
            EXAMPLES[row[0]].append(row[1])
PIECE = re.compile(r"</?[^<>\s\"']{1,30}>?|\[/?[A-Z_]+\]|```|\w+|\s+|.", re.DOTALL)
JSON = ['{"name": "now", "arguments": {}}', '{"name": ', '"arguments": {', "}}", "}", "]", '"', "\\", ", ", "null",
        '{"a": "\\u00e9\\n"}', "[1, true]", "1e999", "NaN", '"name"', "{'a': 1}", "get_weather", "now", "(", ")", "=",
        "-1.5e3"]  # fmt: skip
ODD = ["\ud800", "\x00", "é", "日本", "🙂", "\u2028", "\n\n", " " * 5, "<", "<|", "|>", "｜", "think>", "'", "`"]  # noqa: RUF001
WORD = re.compile(r"zq\d+z")
HEADER = r"(?:<\|(?:start|channel|constrain)\|>|to=)(?:(?!<\|message\|>).)*"  # of a message of Harmony or Muse Glimmer
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")


def odd_answer(name: str, rng: random.Random) -> str:
    """An answer in which nothing is sure."""
    parser, own = PARSERS[name], EXAMPLES[name] or [text for texts in EXAMPLES.values() for text in texts]
    words = iter(range(100))
    parts: list[str] = []
    for _ in range(rng.randrange(12)):
        example = rng.choice(own)
        start = rng.randrange(len(example) + 1)
        pieces = PIECE.findall(example)
        parts.append(
            rng.choice(
                [
                    example,
                    example[start:],
                    example[:start],
                    example[:start] + f"zq{next(words)}z" + example[start + rng.randrange(3) :],
                    rng.choice(pieces),
                    "".join(rng.choice(pieces) for _ in range(rng.randrange(6))),
                    f" zq{next(words)}z ",
                    rng.choice(JSON),
                    rng.choice(ODD),
                    rng.choice(parser.thinking or ("<think>", "</think>")),
                    rng.choice(rng.choice([texts for texts in EXAMPLES.values() if texts])),
                ]
            )
        )
    return "".join(parts)


def leaves(value: Any) -> Iterator[Any]:
    """Keys and plain values of JSON data."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def stands_in(value: Any, text: str) -> bool:
    """Whether a plain value was written in a text, in one of the ways in which formats write it."""
    if isinstance(value, str):
        forms = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
        with warnings.catch_warnings(action="ignore"):  # a made-up answer holds escapes that Python does not know
            read = text.encode("utf-8", "surrogatepass").decode("unicode_escape", "replace")
        plain = text.replace("&quot;", '"').replace("&amp;", "&")  # Kimi-K3 writes keys so
        is_written = any(form in text or form in plain for form in forms)
        return is_written or value.encode("latin-1", "replace").decode() in read
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "n"}[value] in text.lower()
    return any(float(found) == float(value) for found in NUMBER.findall(text)) or str(abs(value)) in text


def assert_not_made_up(call: ParsedCall, text: str) -> None:
    if call.error is not None:
        assert call.arguments in text and "\n" not in call.error
        return
    assert call.name and call.name in text
    for value in leaves(json.loads(call.arguments, parse_constant=pytest.fail)):
        assert stands_in(value, text), (call, value)


def assert_accounted(parser: ToolParser, answer: ParsedAnswer, text: str, in_thought: bool | None) -> None:
    """Each word is in one place: the content, the reasoning, a call or a header; ``None`` if no calls are made."""
    for word in WORD.findall(text):
        if text.count(word) > 1:
            continue
        places = [answer.content, answer.reasoning or "", *(f"{call.name} {call.arguments}" for call in answer.calls)]
        found = sum(word in place for place in places)
        assert found == 1 or (found == 0 and in_call(parser, word, text, in_thought)), (word, found)


def in_call(parser: ToolParser, word: str, text: str, in_thought: bool | None) -> bool:
    """Whether a word is in a part of a call, or of a header, that says nothing about name and arguments."""
    if not isinstance(parser, FormatParser):
        return re.search(HEADER + word, text, re.DOTALL) is not None
    outside = [part for part, is_thought in parser._parts(text, TOOLS, bool(in_thought)) if not is_thought]
    found = [part[made.start : made.end] for part in outside for made in parser._find(part, TOOLS) if made.calls]
    return in_thought is not None and any(word in call for call in found)


def fuzz(name: str, answers: int, seed: int) -> int:
    """Parses odd answers; returns the number of calls without an error in them."""
    parser = PARSERS[name]
    rng = random.Random(f"{name} {seed}")
    made = 0
    for _ in range(answers):
        text, in_thought = odd_answer(name, rng), rng.random() < 0.2
        try:
            answer = parser.parse(text, TOOLS, in_thought=in_thought)
            for call in answer.calls:
                assert_not_made_up(call, text)
            assert_accounted(parser, answer, text, in_thought)
            if in_thought and parser.thinking is not None and parser.thinking[1] not in text:
                assert not answer.calls and not answer.content
            plain = parser.without_calls(text, in_thought=in_thought)
            if plain is not None:
                assert not plain.calls
                assert_accounted(parser, plain, text, None)
        except Exception as error:
            raise AssertionError(f"{name}: {text!r} in_thought={in_thought}") from error
        made += sum(call.error is None for call in answer.calls)
    return made


@pytest.mark.parametrize("name", PARSERS)
def test_odd_answers(name: str) -> None:
    assert fuzz(name, FEW, seed=0) > 20


@pytest.mark.long
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_odd_answers(name: str) -> None:
    fuzz(name, ANSWERS // len(PARSERS) + 1, seed=1)
