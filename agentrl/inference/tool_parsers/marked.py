"""Finds calls that are JSON arguments after a head with the tool's name, between marks: DeepSeek-V3 and Kimi-K2.

Guarantees: a mark inside of a JSON string ends no call; a call without its closing mark reaches to the next mark or to
the end of the text, and is valid if its JSON is complete.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agentrl.inference.tool_parsers.answer import Found, Tools
from agentrl.inference.tool_parsers.values import Malformed, call_with, json_end, malformed


@dataclass(frozen=True)
class MarkedJson:
    """The marks of a format, as patterns.

    Attributes:
        begin: Beginning of a call, or of a block of calls without one.
        head: Text between the beginning and the arguments; group ``id``, if the pattern has one, is the call's id.
        name: Function that returns the tool's name from the match of ``head``; empty if there is none.
        marker: End of a call; group ``closing`` still belongs to the call.
        layout: Error message for a call that cannot be read, with an example of a valid call.
        fence: Text that may stand between the arguments and the end.
    """

    begin: re.Pattern[str]
    head: re.Pattern[str]
    name: Callable[[re.Match[str]], str]
    marker: re.Pattern[str]
    layout: str
    fence: str = ""

    def find(self, text: str, tools: Tools) -> Iterator[Found]:
        """Finds the calls in a text."""
        position = 0
        while begin := self.begin.search(text, position):
            head = self.head.match(text, begin.end())
            value = head.end() if head else begin.end()
            end, is_whole = json_end(text, value) if text.startswith("{", value) else (value, False)
            marker = self.marker.search(text, end if is_whole else value)
            stop = marker.start() if marker else len(text)
            position = marker.end() if marker and marker["closing"] else stop
            name = self.name(head) if head else ""
            if name:
                call = call_with(name, text[value:stop].rstrip().removesuffix(self.fence).rstrip())
                call = replace(call, id=head.groupdict()["id"].strip()) if head and "id" in head.groupdict() else call
            else:
                call = malformed("", text[begin.end() : stop], Malformed(self.layout))
            yield Found(begin.start(), position, (call,))
