"""Parses the answers of Muse Glimmer: messages with a recipient, and calls as ``<atem:invoke name="...">`` in them.

`` to=self<|message|>...<|eom|><|start|>assistant to=TOOL<|message|><atem:function_calls><atem:invoke name="TOOL">
<atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke></atem:function_calls><|eot|>``.

Guarantees: a message to ``self`` is reasoning, one to the user is content, and one to another recipient holds calls;
without a call that can be read it is a malformed call, and so is a call under a header that cannot be read. A message
without its end reaches to the next header or to the end of the text. Where no calls are looked for, a message to
another recipient is content.
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import ParsedAnswer, ParsedCall, Tools, joined
from agentrl.inference.tool_parsers.markup import Markup
from agentrl.inference.tool_parsers.values import NAME, Malformed, malformed

_START, _MESSAGE, _CALL = "<|start|>", "<|message|>", "<atem:"
_FIRST_HEADER = re.compile(r"\s*+(?:to=(?P<to>[^\s<]++)\s*+)?+")  # the prompt ends with the role
_HEADER = re.compile(r"\s*+assistant\s*+(?:to=(?P<to>[^\s<]++)\s*+)?+")
_EDGE = re.compile(r"(?P<closing><\|eo[mt]\|>)|<\|start\|>")
_PARAMETER = r'<atem:parameter\s++name="(?P<key>[^">]*+)"\s*+>'
_BLOCK_END = r"</atem:function_calls>"
_ATEM = Markup(
    call=re.compile(
        r'(?:<atem:function_calls>\s*+)?<atem:invoke\s++name="(?P<name>[^">]*+)"\s*+>|<atem:function_calls>|<atem:invoke'
    ),
    argument=re.compile(_PARAMETER),
    value_end=re.compile(r"(?P<end></atem:parameter>)(?=\s*+(?:<atem:parameter\s|</atem:invoke>|\Z))|" + _PARAMETER),
    call_end=re.compile(rf"</atem:invoke>(?:\s*+{_BLOCK_END})?+"),
    edge=re.compile(rf"(?P<closing></atem:invoke>(?:\s*+{_BLOCK_END})?+|{_BLOCK_END})|<atem:invoke"),
    layout='<atem:function_calls><atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter>'
    f"</atem:invoke>{_BLOCK_END}",
)


class MuseParser:
    """Parser of Muse Glimmer's answers."""

    name = "muse"
    thinking: tuple[str, str] | None = None

    def parse(self, text: str, tools: Tools = (), *, in_thought: bool = False) -> ParsedAnswer:
        """Parses an answer; see :class:`ToolParser`. No prompt ends in an open thought: each message has its header."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        for recipient, body in _messages(text):
            if recipient == "self":
                reasoning.append(body.strip())
            elif recipient == "user" or (recipient == "" and _CALL not in body):
                content.append(body.strip())
            else:
                said, made = _calls(recipient, body, tools)
                content.append(said)
                calls += made
        return ParsedAnswer(joined(content), joined(reasoning) or None, tuple(calls))

    def without_calls(self, text: str, *, in_thought: bool = False) -> ParsedAnswer | None:
        """Separates the reasoning from an answer without calls; see :class:`ToolParser`."""
        if _MESSAGE not in text:
            return None
        parts = [(recipient == "self", body.strip()) for recipient, body in _messages(text)]
        content, reasoning = (joined(body for thought, body in parts if thought is kind) for kind in (False, True))
        return ParsedAnswer(content, reasoning or None, ())


def _calls(recipient: str, body: str, tools: Tools) -> tuple[str, list[ParsedCall]]:
    """Returns the text outside of a message's calls, and the calls."""
    content: list[str] = []
    calls: list[ParsedCall] = []
    position = 0
    for part in _ATEM.find(body, tools) if recipient else ():
        content.append(body[position : part.start])
        calls += part.calls
        position = part.end
    if calls:
        return "".join([*content, body[position:]]).strip(), calls
    problem = "the message holds no tool call" if recipient else "no to=NAME<|message|> stands before the tool call"
    name = recipient if NAME.fullmatch(recipient) else ""
    return "", [malformed(name, body, Malformed(f"{problem}; write {_ATEM.layout}"))]


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yields each message's recipient and body; text outside of messages has no recipient."""
    position = 0
    while (message := text.find(_MESSAGE, position)) >= 0:
        stray, recipient = _header(text[position:message])
        body = message + len(_MESSAGE)
        edge = _EDGE.search(text, body)
        stop = edge.start() if edge else len(text)
        yield from (("", part) for part in stray)
        yield recipient, text[body:stop]
        position = edge.end() if edge and edge["closing"] else stop
    stray, recipient = _header(text[position:])
    yield from (("", part) for part in stray)
    if recipient:
        yield recipient, ""  # cut off in its header


def _header(text: str) -> tuple[tuple[str, ...], str]:
    """Returns the parts of a text before a message that are no header, and the recipient, empty if there is none."""
    before, start, last = text.rpartition(_START)
    header = (_HEADER if start else _FIRST_HEADER).fullmatch(last)
    return ((before,), header["to"] or "") if header else ((before, last), "")
