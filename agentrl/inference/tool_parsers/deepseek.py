# ruff: noqa: RUF001, RUF002 - the wide bars are DeepSeek's own
"""DeepSeek: ``<｜tool▁calls▁begin｜>`` and calls in a code fence (V3, R1) or without one (V3.1); DSML from V3.2 on.

``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, a line break and the arguments in a JSON code fence, or
``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}``; each ends with ``<｜tool▁call▁end｜>``. In DSML, ``<｜DSML｜invoke
name="...">`` holds one ``<｜DSML｜parameter name="..." string="true">`` for each argument, or one JSON object with all
of them; the tag around all calls is ``<｜DSML｜function_calls>``, in V4 ``<｜DSML｜tool_calls>``. V4.1 has a space
before each tag's name: ``<｜DSML｜ calls>``, ``<｜DSML｜ invoke name="...">``.
"""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import Found, Tools
from agentrl.inference.tool_parsers.marked import MarkedJson
from agentrl.inference.tool_parsers.markup import Markup
from agentrl.inference.tool_parsers.values import NAME


def _name(head: re.Match[str]) -> str:
    """Returns the name after the separator (V3), or else the one before it (V3.1); empty if there is none."""
    return next((part for part in (head["name"], head["kind"].strip()) if NAME.fullmatch(part)), "")


_MARKED = MarkedJson(
    begin=re.compile(r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>"),
    head=re.compile(r"""(?P<kind>[^<]*+)<｜tool▁sep｜>\s*+(?P<name>[^\s{}\[\]"`<]*+)\s*+(?:```(?:json)?\s*+)?+"""),
    name=_name,
    marker=re.compile(
        r"(?P<closing><｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?+|<｜tool▁calls▁end｜>)|<｜tool▁calls?▁begin｜>"
    ),
    layout="the tool call cannot be read; write <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
    fence="```",
)
_TAGS = r"(?:function_calls|tool_calls|\x20calls)"
_PARAMETER = r'<｜DSML｜\x20?parameter\s++name="(?P<key>[^">]*+)"(?:\s++string="(?P<string>true|false)")?+\s*+>'
_INVOKE, _INVOKE_END = r"<｜DSML｜\x20?invoke", r"</｜DSML｜\x20?invoke>"
_BLOCK, _BLOCK_END = rf"<｜DSML｜{_TAGS}>", rf"</｜DSML｜{_TAGS}>"
_DSML = Markup(
    call=re.compile(rf'(?:{_BLOCK}\s*+)?{_INVOKE}\s++name="(?P<name>[^">]*+)"\s*+>|{_BLOCK}|{_INVOKE}'),
    argument=re.compile(_PARAMETER),
    value_end=re.compile(
        rf"(?P<end></｜DSML｜\x20?parameter>)(?=\s*+(?:<｜DSML｜\x20?parameter|{_INVOKE_END}|\Z))|" + _PARAMETER
    ),
    call_end=re.compile(rf"{_INVOKE_END}(?:\s*+{_BLOCK_END})?+"),
    edge=re.compile(rf"(?P<closing>{_INVOKE_END}(?:\s*+{_BLOCK_END})?+|{_BLOCK_END})|{_INVOKE}"),
    layout='<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    takes_json=True,
)


def find_deepseek(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    dsml, begin = _DSML.call.search(text), _MARKED.begin.search(text)
    is_dsml = dsml is not None and (begin is None or dsml.start() < begin.start())
    yield from (_DSML if is_dsml else _MARKED).find(text, tools)
