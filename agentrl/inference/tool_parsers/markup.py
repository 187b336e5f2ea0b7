"""Finds calls with a tag for each argument: Qwen3-Coder and GLM from 4.5 on; other modules use it for their families.

Guarantees: a value ends at the first closing tag that is followed by another tag of the call, so a value may contain
tags, except one that begins an argument; a call with wrong or missing tags is malformed as a whole, and reaches to the
next tag that ends or begins a call.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names, tool_parameters
from agentrl.inference.tool_parsers.typed import typed
from agentrl.inference.tool_parsers.values import (
    NAME,
    Malformed,
    json_end,
    malformed,
    mapping,
    object_text,
    read_json,
    shown,
    whose,
)

_SPACE = re.compile(r"\s*+")


@dataclass(frozen=True)
class Markup:
    """The tags of a format, as patterns.

    Attributes:
        call: Beginning of a call; group ``name`` is the tool's name. Group ``outer``, if the pattern has one, is the
            tag around the call; a call without it is text, unless it is valid or names a known tool.
        argument: Beginning of an argument; group ``key`` is its name, group ``string``, if the pattern has one, says
            whether the value is text (``true``, ``string``) or JSON (all else).
        value_end: End of a value, as group ``end``; a match without this group is a tag that no value may contain.
        call_end: End of a call.
        edge: End of a malformed call; group ``closing`` still belongs to the call.
        layout: Example of a valid call, for error messages.
        padded: Whether a line break after the opening tag and before the closing tag is not part of the value.
        takes_json: Whether one JSON object may replace the argument tags.
        read: Function that reads a value that is not a string; see :func:`typed`.
        key: Function that returns an argument's name from the text of group ``key``.
    """

    call: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: re.Pattern[str]
    call_end: re.Pattern[str]
    edge: re.Pattern[str]
    layout: str
    padded: bool = False
    takes_json: bool = False
    read: Callable[[str, str], Any] = read_json
    key: Callable[[str], str] = str.strip

    def find(self, text: str, tools: Tools) -> Iterator[Found]:
        """Finds the calls in a text."""
        known = tool_names(tools)
        position = 0
        while opening := self.call.search(text, position):
            position = opening.end()
            name = _name(opening)
            cursor = _Cursor(self, text, position)
            try:
                call = ParsedCall(name, cursor.arguments(tool_parameters(tools, name), name))
            except Malformed as error:
                is_bare = opening.groupdict().get("outer", "") is None and opening["name"] is not None
                if is_bare and name not in known:
                    continue
                if not cursor.is_closed:
                    cursor.end = _edge(self, text, cursor.end)
                call = malformed(name, text[opening.start() : cursor.end], error)
            yield Found(opening.start(), cursor.end, (call,))
            position = cursor.end


QWEN_CODER = Markup(
    call=re.compile(r"(?:(?P<outer><tool_call>)\s*+)?<function=(?P<name>[^<>]*+)>|<tool_call>"),
    argument=re.compile(r"<parameter=(?P<key>[^<>]*+)>"),
    value_end=re.compile(
        r"(?P<end></parameter>)(?=\s*+(?:<parameter=|</function>|</tool_call>|\Z))|<parameter=[^<>]*+>"
    ),
    call_end=re.compile(r"</function>(?:\s*+</tool_call>)?+|</tool_call>"),
    edge=re.compile(r"(?P<closing></tool_call>)|<tool_call>"),
    layout="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    padded=True,
)
GLM = Markup(
    call=re.compile(r"<tool_call>(?P<name>[^<]*+)"),
    argument=re.compile(r"<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>"),
    value_end=re.compile(
        r"(?P<end></arg_value>)(?=\s*+(?:<arg_key>|</tool_call>|\Z))|<arg_key>[^<]*+</arg_key>\s*+<arg_value>"
    ),
    call_end=re.compile(r"</tool_call>"),
    edge=re.compile(r"(?P<closing></tool_call>)|<tool_call>"),
    layout="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
)


def _name(opening: re.Match[str]) -> str:
    """Returns the tool's name; empty if there is none."""
    name = (opening["name"] or "").strip()
    return name if NAME.fullmatch(name) else ""


def _edge(markup: Markup, text: str, position: int) -> int:
    edge = markup.edge.search(text, position)
    if edge is None:
        return len(text)
    return edge.end() if edge["closing"] else edge.start()


class _Cursor:
    """Reads a call, beginning after its name."""

    def __init__(self, markup: Markup, text: str, position: int) -> None:
        self._markup = markup
        self._text = text
        self.end = position
        self.is_closed = False

    def arguments(self, schema: dict[str, Any], name: str) -> str:
        """Returns the call's arguments as JSON; reads all tags before the values, so a wrong value cuts no call."""
        if not name:
            raise Malformed(f"the tool call has no name; write {self._markup.layout}")
        pairs = list(self._pairs())
        body = self._json_body() if not pairs else None
        self._close()
        if body is not None:
            return object_text(read_json(body, whose(name)), whose(name))
        found = [(self._markup.key(tag["key"]), self._value(tag, raw, schema)) for tag, raw in pairs]
        return object_text(mapping(found, whose(name)), whose(name))

    def _pairs(self) -> Iterator[tuple[re.Match[str], str]]:
        """Yields the opening tag and the text of each argument."""
        self._skip_space()
        while tag := self._markup.argument.match(self._text, self.end):
            self.end = tag.end()
            closing = self._markup.value_end.search(self._text, self.end)
            if closing is None or closing["end"] is None:
                raise Malformed(
                    f"parameter {shown(self._markup.key(tag['key']))} is not closed; write {self._markup.layout}"
                )
            yield tag, self._text[tag.end() : closing.start()]
            self.end = closing.end()
            self._skip_space()

    def _json_body(self) -> str | None:
        start = self.end
        if not self._markup.takes_json or not self._text.startswith("{", start):
            return None
        self.end, is_whole = json_end(self._text, start)
        if not is_whole:
            raise Malformed(f"the arguments do not end; write {self._markup.layout}")
        body = self._text[start : self.end]
        self._skip_space()
        return body

    def _close(self) -> None:
        closing = self._markup.call_end.match(self._text, self.end)
        if closing is None:
            raise Malformed(f"the tool call is not closed or holds other text; write {self._markup.layout}")
        self.end, self.is_closed = closing.end(), True

    def _value(self, tag: re.Match[str], raw: str, schema: dict[str, Any]) -> Any:
        key = self._markup.key(tag["key"])
        if self._markup.padded:
            raw = raw.removeprefix("\n").removesuffix("\n")
        is_text = tag.groupdict().get("string")
        if is_text in ("true", "string"):
            return raw
        return read_json(raw, f"parameter {shown(key)}") if is_text else typed(raw, schema, key, self._markup.read)

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self.end)
        self.end = space.end() if space else self.end
