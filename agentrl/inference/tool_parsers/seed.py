"""Seed-OSS: ``<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>``.

The template prints values as Python does, so a list or an object may be a Python literal instead of JSON.
"""

import re

from agentrl.inference.tool_parsers.markup import Markup
from agentrl.inference.tool_parsers.pythonic import json_or_literal

SEED = Markup(
    call=re.compile(r"(?:(?P<outer><seed:tool_call>)\s*+)?<function=(?P<name>[^<>]*+)>|<seed:tool_call>"),
    argument=re.compile(r"<parameter=(?P<key>[^<>]*+)>"),
    value_end=re.compile(
        r"(?P<end></parameter>)(?=\s*+(?:<parameter=|</function>|</seed:tool_call>|\Z))|<parameter=[^<>]*+>"
    ),
    call_end=re.compile(r"</function>(?:\s*+</seed:tool_call>)?+|</seed:tool_call>"),
    edge=re.compile(r"(?P<closing></seed:tool_call>)|<seed:tool_call>"),
    layout="<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>",
    read=json_or_literal,
)
