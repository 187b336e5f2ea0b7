"""Kimi-K3: tags of its own, ``<|open|>NAME KEY="VALUE"<|sep|>...<|close|>NAME<|sep|>``, around every part of a turn.

A call is ``<|open|>call tool="NAME" index="1"<|sep|>`` and ``<|close|>call<|sep|>``; between them stand arguments,
``<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>``, or one JSON object in a tag ``json``.
A value whose type is not ``string`` is JSON. Tags named ``tools`` stand around all calls, ``response`` around
an answer in words, and the turn's own tag, ``message``, is closed at its end; these are not content.

Guarantees: a value ends at the first closing tag that is followed by another tag of the call; a name or a key is read
without the escapes of an attribute.
"""

import re
from collections.abc import Iterator
from functools import partial
from xml.sax.saxutils import unescape

from agentrl.inference.tool_parsers.answer import Found, Tools
from agentrl.inference.tool_parsers.markup import Markup

_ATTRIBUTE = r'[^"<>]*+'
_ARGUMENT = rf'<\|open\|>argument\s++key="(?P<key>{_ATTRIBUTE})"\s++type="(?P<string>\w++)"\s*+<\|sep\|>'
_CALL = r"<\|open\|>call\b"
_CALL_END = r"<\|close\|>call<\|sep\|>"
_JSON, _JSON_END = r'<\|open\|>json\s++type="object"\s*+<\|sep\|>', r"<\|close\|>json<\|sep\|>"
_AROUND = re.compile(r"<\|(?:open|close)\|>(?:response|tools|message)<\|sep\|>")
_CALLS = Markup(
    call=re.compile(
        rf'{_CALL}\s++tool="(?P<name>{_ATTRIBUTE})"(?:\s++index="\d*+")?+\s*+<\|sep\|>(?:\s*+{_JSON})?+|{_CALL}'
    ),
    argument=re.compile(_ARGUMENT),
    value_end=re.compile(
        r"(?P<end><\|close\|>argument<\|sep\|>)(?=\s*+(?:<\|open\|>argument\b|<\|close\|>call<|\Z))|"
        + re.sub(r"\?P<\w+>", "?:", _ARGUMENT)
    ),
    call_end=re.compile(rf"(?:{_JSON_END}\s*+)?+{_CALL_END}"),
    edge=re.compile(rf"(?P<closing>{_CALL_END})|{_CALL}"),
    layout='<|open|>call tool="NAME"<|sep|><|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>'
    "<|close|>call<|sep|>",
    takes_json=True,
    key=partial(unescape, entities={"&quot;": '"'}),
)


def find_kimi_k3(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text, and the tags around its parts."""
    position = 0
    for part in _CALLS.find(text, tools):
        yield from _tags(text, position, part.start)
        yield part
        position = part.end
    yield from _tags(text, position, len(text))


def _tags(text: str, start: int, end: int) -> Iterator[Found]:
    for tag in _AROUND.finditer(text, start, end):
        yield Found(tag.start(), tag.end())
