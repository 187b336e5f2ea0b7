"""Puts words that cannot be missed into the messages and tools of a prompt.

Guarantees: a word occurs in no template and in no other word, and is lower-case; messages keep their roles, and what
else decides how a template treats them: empty contents, the form of ids, whether arguments are an object.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.call_form import named, names
from agentrl.core.episode import Message
from agentrl.core.images import text_of
from agentrl.core.message_shape import arguments_object

MARK = "agentrl0mark"  # occurs in no template
MOST_TOOLS = 2  # that are tried: one could come through where several do not
NAMED = ("user", "assistant", "system")  # roles whose ``name`` tells participants apart
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "count": {"type": "integer", "description": "A number."},
                "exact": {"type": "boolean", "description": "A choice."},
            },
            "required": ["city"],
        },
    },
}


@dataclass
class Marked:
    """A prompt with words that cannot be missed.

    Attributes:
        messages: Messages of the prompt.
        tools: Tools of the prompt.
        names: Names of the tools.
        contents: Word -> what it stands for, of the messages' texts.
        calls: The same of tool calls.
        asides: The same of what templates leave out by convention.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)
    calls: dict[str, str] = field(default_factory=dict)
    asides: dict[str, str] = field(default_factory=dict)

    def need_last(self) -> None:
        """Makes the last message's asides a part of what must be rendered: its content and its reasoning."""
        last = f"{MARK}{len(self.messages) - 1}"
        for word in [word for word in self.asides if word.startswith((f"{last}c", f"{last}r"))]:
            self.contents[word] = self.asides.pop(word)


def replaced(messages: Sequence[Message], tools: int) -> Marked:
    """Returns messages with words in place of their texts and calls.

    Args:
        messages: Messages of a prompt.
        tools: Number of its tools, for which others stand.
    """
    count = min(tools, MOST_TOOLS)
    names = [f"{MARK}tool{index}x" for index in range(count)]
    stand_ins = [{**TOOL, "function": {**TOOL["function"], "name": name}} for name in names]
    marked = Marked(tools=stand_ins, names=names)
    _mark_texts(marked, messages, lambda _, word: word)
    ids: dict[Any, str] = {}  # ids of calls that hold the tool's name, which some templates render in its place
    for index, message in enumerate(marked.messages):
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]
        if message.get("tool_calls"):
            message["tool_calls"] = [
                _marked_call(call, f"{MARK}{index}f{number}x", marked.calls, ids)
                for number, call in enumerate(message["tool_calls"])
            ]
    return marked


def extended(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Marked:
    """Returns messages with words behind their texts, and with their own calls and tools.

    Args:
        messages: Messages of a prompt.
        tools: Tools of the prompt.
    """
    marked = Marked(tools=list(tools), names=[tool["function"]["name"].lower() for tool in tools])
    _mark_texts(marked, messages, str.__add__)
    return marked


def _mark_texts(marked: Marked, messages: Sequence[Message], put: Callable[[str, str], str]) -> None:
    """Marks the texts of messages; ``put`` makes the new text of a text and its word."""
    for index, message in enumerate(messages):
        role, one, mark = message.get("role", ""), dict(message), f"{MARK}{index}"
        content, reasoning = text_of(message.get("content")), message.get("reasoning_content")
        if content.strip():
            one["content"] = _with_text(message["content"], put(content, f"{mark}cx"))
            if message.get("tool_calls"):
                marked.asides[f"{mark}cx"] = "what an assistant says beside a tool call"
            else:
                marked.contents[f"{mark}cx"] = f"the content of the {role} message"
        if message.get("name") and role in NAMED:
            one["name"] = put(str(message["name"]), f"{mark}nx")
            marked.asides[f"{mark}nx"] = f"the name of {role} messages"
        if reasoning:
            one["reasoning_content"] = put(str(reasoning), f"{mark}rx")
            marked.asides[f"{mark}rx"] = f"the reasoning (reasoning_content) of the {role} message"
        marked.messages.append(one)


def _with_text(content: Any, text: str) -> Any:
    """Returns a content with another text, in the place of its last text."""
    if isinstance(content, str):
        return text
    last = max(index for index, part in enumerate(content) if part["type"] == "text")
    kept = [(index, part) for index, part in enumerate(content) if index == last or part["type"] != "text"]
    return [{"type": "text", "text": text} if index == last else part for index, part in kept]


def _marked_call(call: Mapping[str, Any], mark: str, marks: dict[str, str], ids: dict[Any, str]) -> dict[str, Any]:
    marks[mark] = "a tool call"
    name, call_id = call["function"]["name"], call.get("id")
    if isinstance(call_id, str) and names(call_id, name):
        ids[call_id] = named(name).sub(mark, call_id)
    arguments = "{}"  # also for text that is no object: whether the template takes that is not decided here
    if arguments_object(call["function"]["arguments"]):
        value = f"value-{mark[::-1]}"  # holds no other mark
        marks[value] = "a tool call"
        arguments = json.dumps({"key": value})
    known = {"id": ids[call_id]} if call_id in ids else {}
    return {**call, **known, "function": {**call["function"], "name": mark, "arguments": arguments}}
