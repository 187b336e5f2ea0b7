"""Finds calls of Mistral: ``[TOOL_CALLS]`` stands before a list of calls, or before each call's name.

Up to version 7 of its tokenizer, ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``; from version 11 on,
``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}``; from version 13 on, the same without the id.

Guarantees: a marker inside of a JSON string begins no call; text after a call is content, unless it looks like more
JSON, which makes the call malformed.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names
from agentrl.inference.tool_parsers.values import (
    NAME,
    Malformed,
    call_with,
    calls_from,
    json_end,
    malformed,
    name_in,
    read_json,
)

_MARKER = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*+(?P<name>[^\[{]*+)(?:\[CALL_ID\](?P<id>[^\[{]*+))?+(?:\[ARGS\])?+\s*+")
_GOES_ON = re.compile(r"\s*+(?:[\]}]|,\s*+[\"\[{])")
_LAYOUT = 'the tool call has no JSON arguments; write [TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}'


def find_mistral(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    known = tool_names(tools)
    start = text.find(_MARKER)
    while start >= 0:
        head = _HEAD.match(text, start + len(_MARKER))
        body = head.end() if head else start + len(_MARKER)
        name = head["name"].strip() if head else ""
        value_end, is_whole = json_end(text, body) if text.startswith(("{", "["), body) else (body, False)
        if is_whole and not _GOES_ON.match(text, value_end):
            end = value_end
        else:
            following = text.find(_MARKER, value_end if is_whole else body)
            end = following if following >= 0 else len(text)
        calls = _read(name, text[body:end], known, text[start:end])
        if head and head["id"] and len(calls) == 1:
            calls = (replace(calls[0], id=head["id"].strip()),)
        yield Found(start, end, calls)
        start = text.find(_MARKER, end)


def _read(name: str, value: str, known: frozenset[str], raw: str) -> tuple[ParsedCall, ...]:
    raw = raw.removeprefix(_MARKER)
    is_name = NAME.fullmatch(name) is not None
    if not value.startswith(("{", "[")) or (name and not is_name):
        return (malformed(name if is_name else "", raw, Malformed(_LAYOUT)),)
    if name:
        return (call_with(name, value),)
    try:
        calls = read_json(value, "the tool calls")
        if calls == []:
            raise Malformed("the list of tool calls is empty")
    except Malformed as error:
        return (malformed(name_in(value, known), raw, error),)
    return calls_from(calls, value)
