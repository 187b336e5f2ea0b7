"""Runs the tool calls of an assistant message.

Guarantees: each call gives one event, in the calls' order, and each event has the message that answers the call. A
call that cannot be parsed, names an unknown tool or has wrong arguments never runs; its answer says in one line what is
wrong and what is allowed. An exception of a tool is stored in its event. Only cancellation of the whole episode
(``asyncio.CancelledError``) is raised, and then none of the tasks is left.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any

from pydantic_core import to_jsonable_python

from agentrl.core.episode import Message
from agentrl.core.images import is_pil
from agentrl.core.infrastructure import InfrastructureError
from agentrl.core.registry import nearest
from agentrl.core.shown_parts import PARTS, shown_part
from agentrl.core.valid_text import valid_text
from agentrl.envkit.tools.end_episode import EndEpisode
from agentrl.envkit.tools.tool import Tool, tools_by_name
from agentrl.envkit.tools.tool_arguments import ToolArgumentError, UnparsableArgumentsError, one_line, quote


class ToolEventKind(StrEnum):
    """Outcome of a tool call."""

    OK = "ok"  # the tool returned
    UNPARSABLE = "unparsable"  # the call or its arguments cannot be parsed; not run
    UNKNOWN_TOOL = "unknown_tool"  # no tool has this name; not run
    WRONG_ARGUMENTS = "wrong_arguments"  # a JSON object, but not the tool's arguments; not run
    RAISED = "raised"  # the tool raised, or what it returned cannot be turned into JSON
    TIMEOUT = "timeout"  # the tool took too long; one in a thread may still be running


@dataclass(frozen=True)
class ToolEvent:
    """A tool call and its outcome.

    Attributes:
        kind: Outcome of the call.
        name: The tool's name as the model wrote it; empty if there was none.
        call_id: The call's id; generated if there was none.
        message: The answer that goes back to the model.
        result: The tool's return value, before conversion to text.
        seconds: Duration of the call.
        error: Failure for the log: the traceback if there is one, otherwise the line that the model gets.
        final: Answer with which the tool ended the episode (:class:`~agentrl.EndEpisode`); ``None`` if it did not.
    """

    kind: ToolEventKind
    name: str
    call_id: str
    message: Message
    result: Any = None
    seconds: float = 0.0
    error: str | None = None
    final: str | None = None


async def run_tool_calls(
    message: Message, tools: Sequence[Tool], *, timeout: float | None = None, max_chars: int | None = None
) -> list[ToolEvent]:
    """Run all tool calls of a message concurrently.

    Unambiguous deviations are accepted: ``name`` and ``arguments`` without an enclosing ``function``, arguments as a
    dict, a missing id. A call with the key ``error``, in which a parser says why it could not read the call, is not run
    but answered with that text.

    Args:
        message: An assistant message in OpenAI's shape, with or without ``tool_calls``.
        tools: Tools that the model may call.
        timeout: Time limit of each call in seconds, if the tool has no limit of its own; waiting for a free thread
            counts. An async tool is cancelled; a thread is abandoned and runs on, see :meth:`Tool.call`.
        max_chars: Characters of an answer that are kept, half of them from its end; a note in the middle says how
            many were left out.

    Returns:
        One event per call, in order. A ``str`` result is the answer unchanged; a PIL image, or a list with images (PIL
        images or parts of a message), becomes parts of a message; anything else becomes JSON. Half of a surrogate pair,
        which a JSON request cannot contain, becomes U+FFFD in the answer.

    Raises:
        ValueError: Two tools have the same name, or a limit is not above 0.
    """
    table = tools_by_name(tools)
    for name, limit in (("timeout", timeout), ("max_chars", max_chars)):
        if limit is not None and limit <= 0:
            raise ValueError(f"run_tool_calls({name}={limit}): want more than 0")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_run(call, table, timeout, max_chars)) for call in _read_calls(message)]
    return [task.result() for task in tasks]


@dataclass(frozen=True)
class _Call:
    """A parsed tool call; ``problem`` says why it could not be parsed."""

    id: str
    name: str = ""
    arguments: Any = None
    problem: str | None = None

    def event(self, kind: ToolEventKind, content: Any, *, result: Any = None, error: str | None = None) -> ToolEvent:
        answer: Message = {"role": "tool", "tool_call_id": self.id}
        if self.name:
            answer["name"] = self.name
        answer["content"] = content
        return ToolEvent(kind, self.name, self.id, answer, result, error=error)

    def not_run(self, kind: ToolEventKind, why: str) -> ToolEvent:
        return self.event(kind, f"Not run: {why}", error=why)

    def raised(self, error: BaseException) -> ToolEvent:
        text = str(error)
        content = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return self.event(ToolEventKind.RAISED, content, error="".join(traceback.format_exception(error)))


def _read_calls(message: Message) -> list[_Call]:
    raw_calls = message.get("tool_calls")
    if raw_calls is None:
        return []
    if not isinstance(raw_calls, list | tuple):
        return [_Call("call_0", problem=f"tool_calls must be a list, got {quote(raw_calls)}")]
    given = [_given_id(raw) for raw in raw_calls]
    taken = set(given)
    calls: list[_Call] = []
    for index, (raw, call_id) in enumerate(zip(raw_calls, given, strict=True)):
        if call_id is None:
            call_id = f"call_{index}"
            while call_id in taken:
                call_id += "_"
        calls.append(_read_call(raw, call_id))
    return calls


def _given_id(raw: Any) -> str | None:
    found = raw.get("id") if isinstance(raw, dict) else None
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return found if isinstance(found, str) and found else None


def _read_call(raw: Any, call_id: str) -> _Call:
    if not isinstance(raw, dict):
        return _Call(call_id, problem=f"a tool call must be an object, got {quote(raw)}")
    function = raw if raw.get("function") is None else raw["function"]
    if not isinstance(function, dict):
        return _Call(call_id, problem=f"function must be an object with name and arguments, got {quote(function)}")
    name = function.get("name")
    if not isinstance(name, str):
        name = ""
    problem = raw.get("error")
    if problem is not None:
        text = one_line(problem) if isinstance(problem, str) else quote(problem)
        return _Call(call_id, name, problem=f"the tool call cannot be read: {text}")
    if not name:
        return _Call(call_id, problem="the tool call has no name")
    return _Call(call_id, name, function.get("arguments"))


async def _run(call: _Call, table: dict[str, Tool], timeout: float | None, max_chars: int | None) -> ToolEvent:
    """Runs one call; any result or exception of the tool becomes an event."""
    started = time.perf_counter()
    try:
        event = await _attempt(call, table, timeout)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # a tool is user code and may raise anything
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the episode was cancelled; otherwise a task inside the tool was
        if isinstance(error, InfrastructureError):
            raise  # nothing that the policy could mend
        event = call.raised(error)
    content = event.message["content"]
    if isinstance(content, str):
        content = shortened(valid_text(content), max_chars)
    return replace(event, message={**event.message, "content": content}, seconds=time.perf_counter() - started)


async def _attempt(call: _Call, table: dict[str, Tool], timeout: float | None) -> ToolEvent:
    known = f"known tools: {', '.join(table)}" if table else "there are no tools"
    if call.problem is not None:
        return call.not_run(ToolEventKind.UNPARSABLE, f"{call.problem} ({known})")
    tool = table.get(call.name)
    if tool is None:
        why = f"no tool is called {quote(call.name)}{nearest(call.name, list(table))} ({known})"
        return call.not_run(ToolEventKind.UNKNOWN_TOOL, why)
    try:
        arguments = _arguments(call, tool)
    except UnparsableArgumentsError as error:
        return call.not_run(ToolEventKind.UNPARSABLE, str(error))
    except ToolArgumentError as error:
        return call.not_run(ToolEventKind.WRONG_ARGUMENTS, str(error))
    limit = timeout if tool.timeout is None else tool.timeout
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            result = await tool.call(arguments)
    except EndEpisode as end:
        return replace(call.event(ToolEventKind.OK, end.answer, result=end.answer), final=end.answer)
    except TimeoutError:
        if not scope.expired():
            raise  # raised by the tool itself
        still = "; it may still be running" if tool.in_thread else ""
        why = f"{call.name} did not finish within {limit:g} s and was given up{still}"
        return call.event(ToolEventKind.TIMEOUT, why, error=why)
    return call.event(ToolEventKind.OK, _as_content(tool, result), result=result)


def _arguments(call: _Call, tool: Tool) -> dict[str, Any]:
    if isinstance(call.arguments, dict):
        return tool.validate(call.arguments)
    if call.arguments is None or isinstance(call.arguments, str):
        return tool.parse(call.arguments or "")
    raise UnparsableArgumentsError(f"{tool.name}: want a JSON object as arguments, got {quote(call.arguments)}")


def _as_content(tool: Tool, result: Any) -> Any:
    """Returns a result as the content of a message: parts if it shows images or videos, else text."""
    parts = list(result) if isinstance(result, list | tuple) else [result]
    if not any(is_pil(part) or _is_shown(part) for part in parts):
        return _as_text(tool, result)
    return [
        shown_part({"type": "image", "image": part})
        if is_pil(part)
        else shown_part(part)
        if _is_shown(part)
        else {"type": "text", "text": valid_text(_as_text(tool, part))}
        for part in parts
    ]


def _is_shown(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PARTS


def _as_text(tool: Tool, result: Any) -> str:
    if isinstance(result, str):
        return result.value if isinstance(result, Enum) else str(result)
    try:
        return json.dumps(to_jsonable_python(result), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(result).__name__
        raise TypeError(f"the result of {tool.name}, a {kind}, cannot be turned into JSON: {error}") from error


def shortened(text: str, max_chars: int | None) -> str:
    """Shortens a text to ``max_chars`` characters by leaving out its middle, with a note of how much."""
    if max_chars is None or len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head = max_chars - tail
    note = f"\n[{len(text) - max_chars} characters left out]\n"
    return text[:head] + note + text[len(text) - tail :]
