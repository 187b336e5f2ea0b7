"""Finds calls that are JSON after a mark of the format: Granite 3, Phi-4-mini and MiniMax-M1.

Granite writes ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, from 3.1 on also ``<tool_call>`` before the
list. Phi-4-mini writes ``<|tool_call|>...<|/tool_call|>`` or ``functools[...]``. MiniMax-M1 writes one call a line
between ``<tool_calls>`` and ``</tool_calls>``. (Granite 4 writes calls as Hermes does.)

Guarantees: a mark inside of a JSON string ends no call; a block without its closing mark is valid if its JSON is
complete; a malformed call reaches to the next mark, the next line that begins a call, or the end of the text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names
from agentrl.inference.tool_parsers.values import Malformed, calls_from, json_end, malformed, name_in, read_json

_NEXT = re.compile(r"[\s,;]*+(?=[\[{])")
_GOES_ON = re.compile(r"\s*+[\]}]")


@dataclass(frozen=True)
class JsonBlocks:
    """The marks of a format.

    Attributes:
        opening: Mark before the JSON of one or more calls; group ``mark``, if the pattern has one, is another mark of
            the format, without a call.
        edge: End of a malformed call: group ``closing`` ends the block, after group ``line`` it goes on, and all else
            begins another block.
        layout: Example of a valid call, for error messages.
    """

    opening: re.Pattern[str]
    edge: re.Pattern[str]
    layout: str

    def find(self, text: str, tools: Tools) -> Iterator[Found]:
        """Finds the calls in a text."""
        known = tool_names(tools)
        position = 0
        while opening := self.opening.search(text, position):
            if opening.groupdict().get("mark") is not None:
                position = opening.end()
                yield Found(opening.start(), position)
                continue
            calls, position = self._block(text, opening.end(), known)
            yield Found(opening.start(), position, tuple(calls))

    def _block(self, text: str, start: int, known: frozenset[str]) -> tuple[list[ParsedCall], int]:
        """Reads the calls of a block; returns them and the block's end."""
        calls: list[ParsedCall] = []
        position = start
        while True:
            value = _NEXT.match(text, position)
            if value:
                made, position = self._calls(text, value.end(), known)
                calls += made
                continue
            edge = self.edge.search(text, position)
            stop = edge.start() if edge else len(text)
            rest = text[position:stop].strip()
            goes_on = edge is not None and edge["line"] is not None
            is_closed = edge is not None and edge["closing"] is not None
            if not calls or (rest and (goes_on or is_closed)):
                calls.append(malformed(name_in(rest, known), rest, Malformed(self.layout)))
                position = stop
            if edge is None or not goes_on:
                return calls, edge.end() if edge and is_closed else position
            position = stop

    def _calls(self, text: str, start: int, known: frozenset[str]) -> tuple[tuple[ParsedCall, ...], int]:
        """Reads the calls of one JSON value; returns them and its end."""
        end, is_whole = json_end(text, start)
        if not is_whole or _GOES_ON.match(text, end):
            edge = self.edge.search(text, end if is_whole else start)
            end = edge.start() if edge else len(text)
        raw = text[start:end]
        try:
            value = read_json(raw.rstrip(), "the tool calls")
            if value == []:
                raise Malformed("the list of tool calls is empty")
        except Malformed as error:
            return (malformed(name_in(raw, known), raw, error),), end
        return calls_from(value, raw), end


_LINE = r"""(?P<line>\n[ \t]{0,40}(?=\[?\{\s{0,40}["'](?:name|arguments|function)["']))"""
_ANY = '[{"name": "NAME", "arguments": {"KEY": VALUE}}]'
GRANITE = JsonBlocks(
    opening=re.compile(
        r"<\|tool_call\|>|<tool_call>|(?P<mark>\A\s*+<response>|</response>(?=\s*+(?:\Z|<\|?tool_call)))"
    ),
    edge=re.compile(r"(?P<closing></tool_call>)|<\|tool_call\|>|<tool_call>|</response>|(?P<line>(?!))"),
    layout=f"the tool call is not JSON; write <|tool_call|>{_ANY}",
)
PHI4_MINI = JsonBlocks(
    opening=re.compile(r"<\|tool_call\|>|functools(?=\s*+\[)"),
    edge=re.compile(rf"(?P<closing><\|/tool_call\|>)|<\|tool_call\|>|functools(?=\s*+\[)|{_LINE}"),
    layout=f"the tool call is not JSON; write <|tool_call|>{_ANY}<|/tool_call|>",
)
MINIMAX_M1 = JsonBlocks(
    opening=re.compile(r"<tool_calls>"),
    edge=re.compile(rf"(?P<closing></tool_calls>)|<tool_calls>|{_LINE}"),
    layout=f"the tool call is not JSON; write <tool_calls>{_ANY[1:-1]}</tool_calls>",
)
