# ruff: noqa: RUF001, RUF002 - the colon after the assistant's name is Hunyuan's own
"""Hunyuan: a JSON list of calls between ``<tool_calls>`` tags (A13B); a tag for each argument (V3, V4).

A13B writes ``<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>``. After a thinking block its answer
stands between ``<answer>`` tags, and with tools an answer in words begins with the assistant's name, ``助手：``; these
are not content. V3 writes ``<tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
</tool_call></tool_calls>``, and its public weights have ``:opensource`` at the end of each tag. V4 writes no
``<tool_sep>``, and has another suffix, ``:6124c78e`` in its preview.

Guarantees: a tag inside of a JSON string ends no list; a list without its closing tag reaches to the next one or to the
end of the text, and is valid if its JSON is complete.
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import Found, Tools, tool_names
from agentrl.inference.tool_parsers.markup import Markup
from agentrl.inference.tool_parsers.values import Malformed, calls_from, json_end, malformed, name_in, read_json

_OPENING = re.compile(r"<tool_calls>\s*+")
_TAG = re.compile(r"<(?P<closing>/)?tool_calls>")
_DRESS = re.compile(r"\A\s*+(?:<answer>\s*+)?+(?:助手：)?+")
_ANSWER, _ANSWER_END = "<answer>", "</answer>"


def find_hunyuan(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the lists of calls in a text of A13B, and what stands around an answer."""
    dress = _DRESS.match(text)
    position = dress.end() if dress else 0
    yield Found(0, position)
    known = tool_names(tools)
    while opening := _OPENING.search(text, position):
        value = opening.end()
        end, is_whole = json_end(text, value) if text.startswith(("[", "{"), value) else (value, False)
        tag = _TAG.search(text, end if is_whole else value)
        stop = tag.start() if tag else len(text)
        position = tag.end() if tag and tag["closing"] else stop
        body = text[value:stop].strip()
        try:
            yield Found(opening.start(), position, calls_from(_list(body), body))
        except Malformed as error:
            yield Found(opening.start(), position, (malformed(name_in(body, known), body, error),))
    closing = text.rstrip().removesuffix(_ANSWER_END)
    if dress and _ANSWER in dress[0] and position <= len(closing) < len(text.rstrip()):
        yield Found(len(closing), len(text))


def _list(body: str) -> object:
    calls = read_json(body, "the tool calls")
    if calls == []:
        raise Malformed("the list of tool calls is empty")
    return calls


def _tag(name: str) -> str:
    return rf"<{name}(?::\w++)?+>"


_ARGUMENT = rf"{_tag('arg_key')}(?P<key>[^<]*+){_tag('/arg_key')}\s*+{_tag('arg_value')}"
_CALL_END = rf"{_tag('/tool_call')}(?:\s*+{_tag('/tool_calls')})?+"
HUNYUAN_V3 = Markup(
    call=re.compile(
        rf"(?:{_tag('tool_calls')}\s*+)?+{_tag('tool_call')}(?P<name>[^<]*+)(?:{_tag('tool_sep')})?+|{_tag('tool_calls')}"
    ),
    argument=re.compile(_ARGUMENT),
    value_end=re.compile(
        rf"(?P<end>{_tag('/arg_value')})(?=\s*+(?:{_tag('arg_key')}|{_tag('/tool_call')}|\Z))|"
        + _ARGUMENT.replace("?P<key>", "")
    ),
    call_end=re.compile(_CALL_END),
    edge=re.compile(rf"(?P<closing>{_CALL_END}|{_tag('/tool_calls')})|{_tag('tool_call')}"),
    layout="<tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
)
_SUFFIX = re.compile(r"""["'](:\w++)["']|<arg_key(:\w++)>""")


def suffix_in(chat_template: str) -> str:
    """Returns the suffix of V3's and V4's tags in a chat template; empty if they have none.

    Templates name it once (``{% set HYTK = ':opensource' %}``), or write it in each tag.
    """
    found = _SUFFIX.search(chat_template)
    return (found[1] or found[2]) if found else ""
