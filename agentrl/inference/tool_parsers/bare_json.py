"""Finds calls that are JSON within text, without tags: Llama 3 and 4, and models with an unknown format.

Llama writes ``{"name": ..., "parameters": {...}}``, with or without ``<|python_tag|>`` before it, and several calls one
after the other or separated by ``;``. The fallback for unknown formats reads the same, or a list of such objects, with
or without a code fence.

Guarantees: JSON that names a known tool is a call. For Llama, JSON after the tag is a call too, and so is JSON with a
name and arguments if no other text stands before it. Other JSON is content. A malformed call reaches to the next empty
line, the end of its code fence, the next call that begins a line, or the end of the text.
"""

import re
from collections.abc import Iterator
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, Tools, tool_names
from agentrl.inference.tool_parsers.values import (
    ARGUMENT_KEYS,
    Malformed,
    calls_from,
    json_end,
    malformed,
    name_in,
    parts_of,
    read_json,
)

_CALL = r"""\{\s*+["'](?:name|arguments|parameters|function|type|id)["']\s*+:"""  # a call begins with one of these keys
_START = re.compile(rf"(?:\[\s*+)?{_CALL}")
_LLAMA_START = re.compile(rf"(?P<mark><\|python_(?:tag|start|end)\|>)|(?:\[\s*+)?{_CALL}")
_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*+")
_FENCE = re.compile(r"```\w{0,20}\s{0,20}\Z")
_LOOK_BACK = 50  # characters before a call that are searched for the opening of a code fence
_AFTER = re.compile(rf"\s*+```(?!\w)|\s*+;\s*+\Z|\s*+[;,](?=\s*+{_CALL})")
_BREAK = re.compile(rf"\n[ \t]*+\n|(?=```|<\|python_)|[\n;]\s{{0,40}}+(?={_CALL})")
_LAYOUT = 'the tool call is not JSON; write {"name": "NAME", "parameters": {"KEY": VALUE}}'


def find_json(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls of known tools in a text."""
    known = tool_names(tools)
    position = 0
    while start := _START.search(text, position):
        part, end = _read(text, start.start(), known)
        if part is not None:
            part = _dressed(text, part, position)
            yield part
        position = part.end if part else end


def find_llama(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in the text of a Llama model."""
    known = tool_names(tools)
    position = 0
    is_alone = True  # no text has been found so far
    while start := _LLAMA_START.search(text, position):
        is_alone = is_alone and not text[position : start.start()].strip()
        if start["mark"] == _PYTHON_TAG:
            part = _tagged(text, start, known)
        elif start["mark"]:
            part = Found(start.start(), start.end())
        else:
            part, end = _read(text, start.start(), known, needs_known=not is_alone)
            if part is None:
                position, is_alone = end, False
                continue
            part = _dressed(text, part, position)
        yield part
        position = part.end


def _tagged(text: str, tag: re.Match[str], known: frozenset[str]) -> Found:
    """Parses everything after ``<|python_tag|>`` as a call."""
    space = _SPACE.match(text, tag.end())
    start = space.end() if space else tag.end()
    if text.startswith(("{", "["), start):
        part, _ = _read(text, start, known, must=True)
        if part is not None:
            return Found(tag.start(), _dressed(text, part, start).end, part.calls)
    following = text.find("<|python_", start)
    end = following if following >= 0 else len(text)
    return Found(tag.start(), end, (malformed("", text[start:end], Malformed(_LAYOUT)),))


def _read(
    text: str, start: int, known: frozenset[str], *, needs_known: bool = True, must: bool = False
) -> tuple[Found | None, int]:
    """Reads the JSON that begins at ``start``; returns its calls, or ``None`` if it is content, and its end."""
    end, is_whole = json_end(text, start)
    if not is_whole:
        stop = _BREAK.search(text, end)
        end = stop.start() if stop else len(text)
    raw = text[start:end]
    try:
        value = read_json(raw, "the tool call")
    except Malformed as error:
        name = name_in(raw, known)
        is_call = must or name in known or (name != "" and not needs_known)
        return (Found(start, end, (malformed(name, raw, error),)) if is_call else None), end
    items = value if isinstance(value, list) and value else [value]
    is_call = must or any(_calls(item) in known for item in items)
    if not is_call and (needs_known or not all(_looks_like_call(item) for item in items)):
        return None, end
    return Found(start, end, calls_from(value, raw)), end


def _calls(item: Any) -> str:
    return parts_of(item)[0] if isinstance(item, dict) else ""


def _looks_like_call(item: Any) -> bool:
    name, holder = parts_of(item) if isinstance(item, dict) else ("", {})
    return name != "" and any(key in holder for key in ARGUMENT_KEYS)


def _dressed(text: str, part: Found, position: int) -> Found:
    """Extends a part by the code fence around it and the separator after it, which are not content."""
    before = text[max(position, part.start - _LOOK_BACK) : part.start]
    fence = _FENCE.search(before)
    after = _AFTER.match(text, part.end)
    return Found(
        part.start - (len(before) - fence.start() if fence else 0), after.end() if after else part.end, part.calls
    )
