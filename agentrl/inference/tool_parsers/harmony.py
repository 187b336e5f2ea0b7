"""Parses Harmony, the format of gpt-oss: each message has a header with a channel and, for a call, a recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.add
<|constrain|>json<|message|>{...}<|call|>``; the recipient may also stand before the channel.

Guarantees: a message to a recipient other than the user is a call in any channel; other messages of the analysis
channel are reasoning; all other text is content. A marker inside of a JSON string ends no message. A call that ends
within its header is malformed. Where no calls are looked for, a message to such a recipient is content as it stands.

OpenAI's own parser, the package ``openai-harmony``, is not used. It reads ids, not text; it needs a vocabulary file
that it fetches from the network (or finds in ``TIKTOKEN_ENCODINGS_BASE``); it raises on most answers that were cut off,
which loses what they say; and it makes calls of headers that cannot be read. It agrees with this one on whole answers,
and on the cut ones that it takes (version 0.0.8, 3000 random answers).
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import ParsedAnswer, ParsedCall, Tools, joined
from agentrl.inference.tool_parsers.values import NAME, Malformed, call_with, json_end, malformed

_START, _MESSAGE = "<|start|>", "<|message|>"
_END = re.compile(r"<\|(?:(?P<closing>end|call|return)|start|channel)\|>")
_CLOSING = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"(?:\A|\s|assistant|commentary|analysis)to=(?P<name>[^\s<]++)")
_KIND = re.compile(r"<\|channel\|>\s*+(?P<kind>\w*+)")
_MARKER = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_SPACE = re.compile(r"\s*+")
_ROLES = frozenset({"", "assistant", "analysis", "commentary", "final"})  # words of a header before its recipient
_PEOPLE = frozenset({"assistant", "user", "all"})


class HarmonyParser:
    """Parser of gpt-oss' answers."""

    name = "harmony"
    thinking: tuple[str, str] | None = None

    def parse(self, text: str, tools: Tools = (), *, in_thought: bool = False) -> ParsedAnswer:
        """Parses an answer; see :class:`ToolParser`. No prompt ends in an open thought: each message has its header."""
        return _read(text, makes_calls=True)

    def without_calls(self, text: str, *, in_thought: bool = False) -> ParsedAnswer | None:
        """Separates the reasoning from an answer without calls; see :class:`ToolParser`."""
        return _read(text, makes_calls=False) if _MARKER.search(text) else None


def _read(text: str, *, makes_calls: bool) -> ParsedAnswer:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ParsedCall] = []
    for header, body in _messages(text):
        recipient = _RECIPIENT.search(header)
        kind = _KIND.search(header)
        if recipient and recipient["name"] not in _PEOPLE:
            if makes_calls:
                calls.append(_call(recipient["name"], body))
            else:
                whole = header if body is None else header + _MESSAGE + body
                content.append(whole.removeprefix(_START + "assistant").strip())
        elif kind and kind["kind"] == "analysis":
            reasoning.append((body or "").strip())
        else:
            content.append((body or "").strip())
    return ParsedAnswer(joined(content).strip(), joined(reasoning) or None, tuple(calls))


def _messages(text: str) -> Iterator[tuple[str, str | None]]:
    """Yields each message's header and body; stray text has an empty header, a message cut in its header no body."""
    position = 0
    while position < len(text):
        message = text.find(_MESSAGE, position)
        is_whole = message >= 0
        *cut, last = _CLOSING.split(text[position : message if is_whole else len(text)])
        for header in cut if is_whole else [*cut, last]:
            stray, start = _before_header(header, is_whole=False)
            yield from ((("", stray),) if stray else ())
            yield header[start:], None
        if not is_whole:
            return
        stray, start = _before_header(last, is_whole=True)
        yield from ((("", stray),) if stray else ())
        body = message + len(_MESSAGE)
        end = _END.search(text, _json_end(text, body))
        stop = end.start() if end else len(text)
        yield last[start:], text[body:stop]
        position = end.end() if end and end["closing"] else stop


def _before_header(header: str, *, is_whole: bool) -> tuple[str, int]:
    """Returns the text before a header that is not part of it, and the header's position."""
    marker = _MARKER.search(header)
    end = marker.start() if marker else len(header)
    may_begin = marker[0] != _START if marker else is_whole  # after the prompt's role, a recipient may follow at once
    recipient = _RECIPIENT.search(header, 0, end) if may_begin else None
    start = recipient.start() if recipient else end
    before = header[:start].strip()
    return ("", 0) if recipient and before in _ROLES else (before, start)


def _json_end(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    value = space.end() if space else start
    end, is_whole = json_end(text, value) if text.startswith("{", value) else (start, False)
    return end if is_whole else start


def _call(recipient: str, body: str | None) -> ParsedCall:
    name = recipient.removeprefix("functions.")
    if not NAME.fullmatch(name):
        return malformed("", body or "", Malformed("the tool call has no name; write to=functions.NAME"))
    if body is None:
        return malformed(name, "", Malformed(f"the tool call ends before its arguments; write {_MESSAGE} and JSON"))
    return call_with(name, body.strip())
