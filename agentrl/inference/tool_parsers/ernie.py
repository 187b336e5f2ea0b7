"""ERNIE 4.5: calls as Hermes writes them, and answers in words between ``<response>`` tags, which are not content."""

import re
from collections.abc import Iterator

from agentrl.inference.tool_parsers.answer import Found, Tools
from agentrl.inference.tool_parsers.hermes import find_hermes

_OPENING = re.compile(r"\A\s*+<response>")
_CLOSING = re.compile(r"</response>\s*+\Z")
_FIRST_CALL = "<tool_call>"


def find_ernie(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text, and the tags around an answer in words."""
    opening = _OPENING.match(text)
    words_end = text.find(_FIRST_CALL)
    words = text[: words_end if words_end >= 0 else len(text)]
    if opening:
        yield Found(0, opening.end())
        closing = _CLOSING.search(words)
        if closing:
            yield Found(closing.start(), len(words))
    yield from find_hermes(text, tools)
