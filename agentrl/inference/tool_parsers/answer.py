"""Parsed answers, and the frame that all formats share: reasoning, calls, and the text between them.

Guarantees: every character of an answer is reasoning, part of a call, one of the format's own markers, or content; the
calls stand in the order in which they were written. What stands in the thinking block is reasoning, a call too: a
template puts calls after it. A block that was opened and never closed reaches to the end. Where the template opened
the block in the prompt, all text before the closing tag is reasoning.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it.

    Attributes:
        name: The tool's name; empty where the text of the call holds none.
        arguments: A JSON object as text; in a malformed call the text that the model wrote.
        error: Explanation for the model, one line, of a malformed call; ``None`` for a valid call.
    """

    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer taken apart.

    Attributes:
        content: Text outside of calls and reasoning, stripped.
        reasoning: Text of the thinking block, stripped; ``None`` where there is none.
        calls: The calls in their order, malformed ones with them.
    """

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]


class ToolParser(Protocol):
    """Reads one format of tool calls."""

    name: str

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Take an answer apart; never raises.

        Args:
            text: The sampled answer, decoded with special tokens, without the token that ends the turn.
            tools: OpenAI tool schemas: the types of arguments where the format writes them as plain text, and the
                names that tell a call from other text where the format has no marker.
        """
        ...


@dataclass(frozen=True)
class Found:
    """A part of an answer that is not content.

    Attributes:
        start: Position of its first character.
        end: Position after its last one.
        calls: The calls in it; none in a marker that stands alone.
    """

    start: int
    end: int
    calls: tuple[ParsedCall, ...] = ()


class FormatParser:
    """A format whose calls stand in running text, with an optional thinking block before them.

    Args:
        name: Name of the format.
        find: Gives the calls of a text, in order and without overlap.
        thinking: Tags of the thinking block.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[str, Tools], Iterable[Found]],
        thinking: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        self.name = name
        self._find = find
        self._opening, self._closing = thinking

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Take an answer apart; see :class:`ToolParser`."""
        block = self._block(text)
        if block is None:
            return _answer(text, self._find(text, tools), None)
        before, reasoning, after = block
        if not text.lstrip().startswith(self._opening):
            found = list(self._find(text, tools))
            closing = len(text) - len(after) - len(self._closing)
            if any(part.start < closing < part.end and _is_well_formed(part) for part in found):
                return _answer(text, found, None)  # the closing tag is an argument's
        first, second = (_answer(part, self._find(part, tools), None) for part in (before, after))
        content = (first.content + "\n" + second.content).strip()
        return ParsedAnswer(content, reasoning.strip() or None, first.calls + second.calls)

    def _block(self, text: str) -> tuple[str, str, str] | None:
        """Text before, in and after the thinking block."""
        head, closing, after = text.partition(self._closing)
        before, opening, reasoning = head.partition(self._opening)
        if closing:
            return (before, reasoning, after) if opening else ("", head, after)
        return ("", reasoning, "") if opening and not before.strip() else None


def _answer(text: str, found: Iterable[Found], reasoning: str | None) -> ParsedAnswer:
    content: list[str] = []
    calls: list[ParsedCall] = []
    position = 0
    for part in found:
        content.append(text[position : part.start])
        calls += part.calls
        position = part.end
    content.append(text[position:])
    return ParsedAnswer("".join(content).strip(), reasoning, tuple(calls))


def _is_well_formed(part: Found) -> bool:
    return bool(part.calls) and all(call.error is None for call in part.calls)


def tool_names(tools: Tools) -> frozenset[str]:
    """Names of the known tools."""
    return frozenset(function["name"] for function in _functions(tools))


def tool_parameters(tools: Tools, name: str) -> dict[str, Any]:
    """JSON schema of a tool's arguments; empty where the tool or its schema is not known."""
    for function in _functions(tools):
        if function["name"] == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def _functions(tools: Tools) -> Iterable[dict[str, Any]]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function
