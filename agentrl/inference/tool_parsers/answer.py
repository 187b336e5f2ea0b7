"""Parsed answers, and the parser that most formats share: it separates reasoning, calls, and the text between them.

Guarantees: every character of an answer is reasoning, part of a call, a marker of the format, or content; calls keep
the order in which they were written. All text in a thinking block is reasoning, even a tool call. A block that is
never closed reaches to the end. If the prompt already opened the block, all text before the closing tag is reasoning;
so it is if the answer closes a block that nobody opened. A tag in a well-formed call is part of an argument.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ParsedCall:
    """A parsed tool call.

    Attributes:
        name: The tool's name; empty if the call has none.
        arguments: A JSON object as text; for a malformed call, the text that the model wrote.
        error: One line that explains to the model why the call is malformed; ``None`` for a valid call.
        id: The id that the model wrote; ``None`` in formats without ids.
    """

    name: str
    arguments: str
    error: str | None = None
    id: str | None = field(default=None, compare=False)


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
    """Reads one format of tool calls.

    Attributes:
        name: Name of the format.
        thinking: Opening and closing tag of the thinking block; ``None`` if the format marks each message's kind.
    """

    name: str
    thinking: tuple[str, str] | None

    def parse(self, text: str, tools: Tools = (), *, in_thought: bool = False) -> ParsedAnswer:
        """Parses an answer; never raises.

        Args:
            text: The sampled answer, decoded with special tokens, without the end-of-turn token.
            tools: OpenAI tool schemas. They give the types of arguments that a format writes as plain text, and the
                names that distinguish calls from other text in a format without markers.
            in_thought: Whether the prompt ends in an open thinking block.
        """
        ...

    def without_calls(self, text: str, *, in_thought: bool = False) -> ParsedAnswer | None:
        """Separates the reasoning at the beginning of an answer in which no calls are looked for; never raises.

        Args:
            text: As for :meth:`parse`.
            in_thought: As for :meth:`parse`.

        Returns:
            The answer, without calls; ``None`` if all of the text is content.
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
        self.thinking: tuple[str, str] | None = thinking
        self._find = find
        self._opening, self._closing = thinking

    def parse(self, text: str, tools: Tools = (), *, in_thought: bool = False) -> ParsedAnswer:
        """Parses an answer; see :class:`ToolParser`."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        for part, is_thought in self._parts(text, tools, in_thought):
            if is_thought:
                reasoning.append(part.strip())
                continue
            said, made = _apart(part, self._find(part, tools))
            content.append(said)
            calls += made
        return ParsedAnswer(joined(content), joined(reasoning) or None, tuple(calls))

    def without_calls(self, text: str, *, in_thought: bool = False) -> ParsedAnswer | None:
        """Separates the reasoning from an answer without calls; see :class:`ToolParser`."""
        first = self._first_thought(text, in_thought)
        reasoning, rest = first or ("", text)
        marks = [
            part for part in self._find(rest, ()) if not part.calls and part.end > part.start
        ]  # of the format, around the content
        if first is None and not marks:
            return None
        content, _ = _apart(rest, marks)
        return ParsedAnswer(content, reasoning.strip() or None, ())

    def _parts(self, text: str, tools: Tools, in_thought: bool) -> Iterator[tuple[str, bool]]:
        """Yields the text of thoughts and the text between them, in order; True marks a thought."""
        first = self._first_thought(text, in_thought) or self._closed_thought(text, tools)
        if first is not None:
            yield first[0], True
        yield from self._later_parts(text if first is None else first[1], tools)

    def _first_thought(self, text: str, in_thought: bool) -> tuple[str, str] | None:
        """Returns the thought that an answer begins in and the text after it; ``None`` if it begins outside of one."""
        start = text.lstrip()
        is_opened = start.startswith(self._opening)
        if not is_opened and not in_thought:
            return None
        thought, _, rest = (start.removeprefix(self._opening) if is_opened else text).partition(self._closing)
        return thought, rest

    def _closed_thought(self, text: str, tools: Tools) -> tuple[str, str] | None:
        """Returns the text before and after a closing tag that has no opening tag; ``None`` without such a tag."""
        thought, closing, rest = text.partition(self._closing)
        if not closing or self._opening in thought:
            return None
        is_argument = any(start < len(thought) < end for start, end in self._call_spans(text, tools))
        return None if is_argument else (thought, rest)

    def _later_parts(self, text: str, tools: Tools) -> Iterator[tuple[str, bool]]:
        position = 0
        for opening in self._openings(text, tools):
            if opening < position:
                continue  # within the thought before
            yield text[position:opening], False
            start = opening + len(self._opening)
            closing = text.find(self._closing, start)
            yield text[start : closing if closing >= 0 else len(text)], True
            position = closing + len(self._closing) if closing >= 0 else len(text)
        yield text[position:], False

    def _openings(self, text: str, tools: Tools) -> Iterator[int]:
        """Yields the positions of opening tags that are not part of an argument."""
        opening = text.find(self._opening)
        spans = self._call_spans(text, tools) if opening >= 0 else iter(())
        span = next(spans, None)
        while opening >= 0:
            while span is not None and span[1] <= opening:
                span = next(spans, None)
            if span is None or opening <= span[0]:
                yield opening
            opening = text.find(self._opening, opening + len(self._opening))

    def _call_spans(self, text: str, tools: Tools) -> Iterator[tuple[int, int]]:
        """Yields where each well-formed call of a text begins and ends."""
        for part in self._find(text, tools):
            if part.calls and all(call.error is None for call in part.calls):
                yield part.start, part.end


def joined(parts: Iterable[str]) -> str:
    """Joins the parts that are not empty by line breaks."""
    return "\n".join(part for part in parts if part)


def _apart(text: str, found: Iterable[Found]) -> tuple[str, list[ParsedCall]]:
    """Returns the text outside of calls, stripped, and the calls."""
    content: list[str] = []
    calls: list[ParsedCall] = []
    position = 0
    for part in found:
        content.append(text[position : part.start])
        calls += part.calls
        position = part.end
    content.append(text[position:])
    return "".join(content).strip(), calls


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
