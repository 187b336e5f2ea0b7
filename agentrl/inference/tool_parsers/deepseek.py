# ruff: noqa: RUF001, RUF002 - the wide bars are DeepSeek's own
"""DeepSeek: ``<｜tool▁calls▁begin｜>`` and calls in a code fence (V3, R1) or without one (V3.1); DSML from V3.2 on.

``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, a line break and the arguments in a JSON code fence, or
``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}``; each ends with ``<｜tool▁call▁end｜>``. In DSML, ``<｜DSML｜invoke
name="...">`` holds one ``<｜DSML｜parameter name="..." string="true">`` for each argument, or one JSON object with all
of them; the tag around all calls is ``<｜DSML｜function_calls>``, in V4 ``<｜DSML｜tool_calls>``.

Guarantees: a marker inside of a JSON string ends no call; a call without its closing marker reaches to the next marker
or to the end of the text, and is valid if its JSON is complete.
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import Found, Tools
from agentrl.inference.tool_parsers.markup import Markup
from agentrl.inference.tool_parsers.values import NAME, Malformed, call_with, json_end, malformed

_BEGIN = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>")
_MARKER = re.compile(
    r"(?P<closing><｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?+|<｜tool▁calls▁end｜>)|<｜tool▁calls?▁begin｜>"
)
_HEAD = re.compile(r"""(?P<kind>[^<]*+)<｜tool▁sep｜>\s*+(?P<name>[^\s{}\[\]"`<]*+)\s*+(?:```(?:json)?\s*+)?+""")
_LAYOUT = "the tool call cannot be read; write <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
_PARAMETER = r'<｜DSML｜parameter\s++name="(?P<key>[^">]*+)"(?:\s++string="(?P<string>true|false)")?+\s*+>'
_BLOCK_END = r"</｜DSML｜(?:function_calls|tool_calls)>"
_DSML = Markup(
    call=re.compile(
        r'(?:<｜DSML｜(?:function_calls|tool_calls)>\s*+)?<｜DSML｜invoke\s++name="(?P<name>[^">]*+)"\s*+>'
        r"|<｜DSML｜(?:function_calls|tool_calls)>|<｜DSML｜invoke"
    ),
    argument=re.compile(_PARAMETER),
    value_end=re.compile(
        r"(?P<end></｜DSML｜parameter>)(?=\s*+(?:<｜DSML｜parameter|</｜DSML｜invoke>|\Z))|" + _PARAMETER
    ),
    call_end=re.compile(rf"</｜DSML｜invoke>(?:\s*+{_BLOCK_END})?+"),
    edge=re.compile(rf"(?P<closing></｜DSML｜invoke>(?:\s*+{_BLOCK_END})?+|{_BLOCK_END})|<｜DSML｜invoke"),
    layout='<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    takes_json=True,
)


def find_deepseek(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    dsml, begin = _DSML.call.search(text), _BEGIN.search(text)
    if dsml and (begin is None or dsml.start() < begin.start()):
        yield from _DSML.find(text, tools)
        return
    position = 0
    while begin := _BEGIN.search(text, position):
        head = _HEAD.match(text, begin.end())
        value = head.end() if head else begin.end()
        end, is_whole = json_end(text, value) if text.startswith("{", value) else (value, False)
        marker = _MARKER.search(text, end if is_whole else value)
        stop = marker.start() if marker else len(text)
        position = marker.end() if marker and marker["closing"] else stop
        name = _name(head)
        if name:
            call = call_with(name, text[value:stop].rstrip().removesuffix("```").rstrip())
        else:
            call = malformed("", text[begin.end() : stop], Malformed(_LAYOUT))
        yield Found(begin.start(), position, (call,))


def _name(head: re.Match[str] | None) -> str:
    """Returns the name after the separator (V3), or else the one before it (V3.1); empty if there is none."""
    parts = (head["name"], head["kind"].strip()) if head else ()
    return next((part for part in parts if NAME.fullmatch(part)), "")
