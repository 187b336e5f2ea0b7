"""Parsed answers, and the parser that most formats share: it separates reasoning, calls, and the text between them.

Guarantees: every character of an answer is reasoning, part of a call, a marker of the format, or content; calls keep
the order in which they were written. All text in the thinking block is reasoning, even a tool call. A block that is
never closed reaches to the end. If the prompt already opened the block, all text before the closing tag is reasoning.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ParsedCall:
    """A parsed tool call.

    Attributes:
        name: The tool's name; empty if the call has none.
        arguments: A JSON object as text; for a malformed call, the text that the model wrote.
        error: One line that explains to the model why the call is malformed; ``None`` for a valid call.
    """

    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer.

    Attributes:
        content: Text outside of calls and reasoning, stripped.
        reasoning: Text of the thinking block, stripped; ``None`` if there is none.
        calls: Tool calls in their order, including malformed ones.
    """

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]


class ToolParser(Protocol):
    """Reads one format of tool calls."""

    name: str

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """Parses an answer; never raises.

        Args:
            text: The sampled answer, decoded with special tokens, without the end-of-turn token.
            tools: OpenAI tool schemas. They give the types of arguments that a format writes as plain text, and the
                names that distinguish calls from other text in a format without markers.
        """
        ...


@dataclass(frozen=True)
class Found:
    """A part of an answer that is not content.

    Attributes:
        start: Position of the part's first character.
        end: Position after the part's last character.
        calls: Calls in the part; empty for a marker without a call.
    """

    start: int
    end: int
    calls: tuple[ParsedCall, ...] = ()


class FormatParser:
    """Parser of a format that writes calls within text, after an optional thinking block.

    Args:
        name: Name of the format.
        find: Function that yields the calls of a text, in order and without overlap.
        thinking: Opening and closing tag of the thinking block.
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
        """Parses an answer; see :class:`ToolParser`."""
        block = self._block(text)
        if block is None:
            return _answer(text, self._find(text, tools), None)
        before, reasoning, after = block
        if not text.lstrip().startswith(self._opening):
            found = list(self._find(text, tools))
            closing = len(text) - len(after) - len(self._closing)
            if any(part.start < closing < part.end and _is_well_formed(part) for part in found):
                return _answer(text, found, None)  # the closing tag is part of an argument
        first, second = (_answer(part, self._find(part, tools), None) for part in (before, after))
        content = (first.content + "\n" + second.content).strip()
        return ParsedAnswer(content, reasoning.strip() or None, first.calls + second.calls)

    def _block(self, text: str) -> tuple[str, str, str] | None:
        """Returns the text before, in and after the thinking block; ``None`` if there is none."""
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
    """JSON schema of a tool's arguments; empty if the tool or its schema is unknown."""
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
