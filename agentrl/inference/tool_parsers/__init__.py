"""Tool calls in what a model sampled: one parser for each format that models write.

Guarantees: any text is taken apart without an exception and in linear time; a call that cannot be read is reported
with what is wrong with it, and never lost, guessed or mended; arguments that are reported without an error are the
text of one JSON object. Importing this needs neither torch nor transformers.

The parsers are our own. ``transformers`` has one (``tokenizer.parse_response``), which is driven by a
``response_template`` on the tokenizer; it does not fit as a base: few models ship that template, it raises on the first
region that it cannot read and so loses the calls around it, and evaluating a server must work without the library.
"""

from agentrl.inference.tool_parsers.answer import ParsedAnswer, ParsedCall, ToolParser
from agentrl.inference.tool_parsers.choice import PARSERS, parser_for

__all__ = ["PARSERS", "ParsedAnswer", "ParsedCall", "ToolParser", "parser_for"]
