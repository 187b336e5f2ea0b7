"""Finds calls of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

Guarantees: a tag inside of a JSON string ends no call; a call without its closing tag reaches to the next tag or to the
end of the text, and is valid if its JSON is complete.
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names
from agentrl.inference.tool_parsers.values import Malformed, call_from, json_end, malformed, name_in, read_json

_OPENING = "<tool_call>"
_TAG = re.compile(r"<(?P<closing>/)?tool_call>")
_SPACE = re.compile(r"\s*+")


def find_hermes(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    known = tool_names(tools)
    start = text.find(_OPENING)
    while start >= 0:
        body = start + len(_OPENING)
        space = _SPACE.match(text, body)
        value = space.end() if space else body
        inside = body
        if text.startswith(("{", "["), value):
            end, is_whole = json_end(text, value)
            inside = end if is_whole else body
        tag = _TAG.search(text, inside)
        stop = tag.start() if tag else len(text)
        end = tag.end() if tag and tag["closing"] else stop
        yield Found(start, end, (_read(text[body:stop].strip(), known),))
        start = text.find(_OPENING, end)


def _read(body: str, known: frozenset[str]) -> ParsedCall:
    try:
        return call_from(read_json(body, "the tool call"), body)
    except Malformed as error:
        return malformed(name_in(body, known), body, error)
