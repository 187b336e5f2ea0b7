"""Kimi-K2: ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``, any number.

A pair of marks, ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``, stands around all calls. The text
before the arguments is the call's id: the tool's name after ``functions.``, and the call's number in the conversation.
"""

import re

from agentrl.inference.tool_parsers.marked import MarkedJson
from agentrl.inference.tool_parsers.values import NAME

_SECTION = r"<\|tool_calls?_section_begin\|>"  # models write the singular too
_SECTION_END = r"<\|tool_calls?_section_end\|>"
_CALL_END = r"<\|tool_call_end\|>"


def _name(head: re.Match[str]) -> str:
    name = re.sub(r":\d++\Z", "", head["id"].strip().removeprefix("functions."))
    return name if NAME.fullmatch(name) else ""


KIMI = MarkedJson(
    begin=re.compile(rf"(?:{_SECTION}\s*+)?<\|tool_call_begin\|>|{_SECTION}"),
    head=re.compile(r"(?P<id>[^<{]*+)<\|tool_call_argument_begin\|>\s*+"),
    name=_name,
    marker=re.compile(
        rf"(?P<closing>{_CALL_END}(?:\s*+{_SECTION_END})?+|{_SECTION_END})|{_SECTION}|<\|tool_call_begin\|>"
    ),
    layout="the tool call cannot be read; write "
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
)
