"""Parses tool calls in sampled text: one parser for each format that models write.

Guarantees: any text is parsed without an exception and in linear time; a malformed call is reported with its error, and
never lost, guessed or repaired; the arguments of a call without an error are the text of one JSON object. Importing
this needs neither torch nor transformers.

The parser of ``transformers`` (``tokenizer.parse_response``, driven by a ``response_template`` of the tokenizer) is not
used: few models have that template, one malformed call makes it lose the others, and an evaluation of a server must
work without the library.
"""

from agentrl.inference.tool_parsers.answer import ParsedAnswer, ParsedCall, ToolParser
from agentrl.inference.tool_parsers.choice import FALLBACK, PARSERS, parser_for

__all__ = ["FALLBACK", "PARSERS", "ParsedAnswer", "ParsedCall", "ToolParser", "parser_for"]
