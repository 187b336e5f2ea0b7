"""Cohere: a JSON list of calls between ``<|START_ACTION|>`` and ``<|END_ACTION|>``; Command R7B, Command A and later.

A call is ``{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}``. An answer in words stands between
``<|START_RESPONSE|>`` and ``<|END_RESPONSE|>``, in later models ``<|START_TEXT|>`` and ``<|END_TEXT|>``, which are not
content. The numbers of calls are not kept as ids: the template counts the calls itself, whatever their ids are.

Guarantees: a mark inside of a JSON string ends no list; a list without its closing mark reaches to the next one or to
the end of the text, and is valid if its JSON is complete.
"""

import re
from collections.abc import Iterator
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names
from agentrl.inference.tool_parsers.values import Malformed, calls_from, json_end, malformed, read_json

_OPENING = re.compile(r"<\|START_ACTION\|>\s*+|(?P<mark><\|(?:START|END)_(?:RESPONSE|TEXT)\|>)")
_MARK = re.compile(r"<\|(?:(?P<closing>END)|START)_ACTION\|>")
_NAME = re.compile(r'"tool_name"\s*+:\s*+"([^"\\\ud800-\udfff]*+)"')
_LAYOUT = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": {"KEY": VALUE}}]<|END_ACTION|>'


def find_cohere(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text, and the marks around an answer in words."""
    known = tool_names(tools)
    position = 0
    while opening := _OPENING.search(text, position):
        value = opening.end()
        if opening["mark"]:
            position = value
            yield Found(opening.start(), value)
            continue
        end, is_whole = json_end(text, value) if text.startswith(("[", "{"), value) else (value, False)
        mark = _MARK.search(text, end if is_whole else value)
        stop = mark.start() if mark else len(text)
        position = mark.end() if mark and mark["closing"] else stop
        yield Found(opening.start(), position, _calls(text[value:stop].strip(), known))


def _calls(body: str, known: frozenset[str]) -> tuple[ParsedCall, ...]:
    try:
        if not body:
            raise Malformed(f"the list of tool calls is empty; write {_LAYOUT}")
        value = read_json(body, "the tool calls")
        if value == []:
            raise Malformed(f"the list of tool calls is empty; write {_LAYOUT}")
    except Malformed as error:
        names = _NAME.findall(body)
        name = next((one for one in names if one in known), names[0] if names else "")
        return (malformed(name, body, error),)
    return calls_from([_named(one) for one in value] if isinstance(value, list) else _named(value), body)


def _named(call: Any) -> Any:
    """Returns a call with its name where other formats have it."""
    if not isinstance(call, dict) or "tool_name" not in call or "name" in call:
        return call
    return {**{key: value for key, value in call.items() if key != "tool_name"}, "name": call["tool_name"]}
