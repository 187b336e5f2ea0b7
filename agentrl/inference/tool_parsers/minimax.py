"""Calls of MiniMax-M2: ``<invoke name="...">`` and a ``<parameter name="...">`` for each argument.

``<minimax:tool_call>`` and ``</minimax:tool_call>`` stand around all calls of an answer. (MiniMax-M1 writes JSON:
``json_blocks.py``.)
"""

import re

from agentrl.inference.tool_parsers.markup import Markup

_PARAMETER = r'<parameter\s++name="(?P<key>[^">]*+)"\s*+>'
MINIMAX_M2 = Markup(
    call=re.compile(
        r'(?:<minimax:tool_call>\s*+)?<invoke\s++name="(?P<name>[^">]*+)"\s*+>|<minimax:tool_call>|<invoke(?=[\s>])'
    ),
    argument=re.compile(_PARAMETER),
    value_end=re.compile(r"(?P<end></parameter>)(?=\s*+(?:<parameter\s|</invoke>|\Z))|" + _PARAMETER),
    call_end=re.compile(r"</invoke>(?:\s*+</minimax:tool_call>)?+"),
    edge=re.compile(r"(?P<closing></invoke>(?:\s*+</minimax:tool_call>)?+|</minimax:tool_call>)|<invoke(?=[\s>])"),
    layout='<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>'
    "</minimax:tool_call>",
)
