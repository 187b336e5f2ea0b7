"""Cuts out of a rendered conversation what a model would have sampled for an assistant message, and parses it back."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError as JinjaError

from agentrl.core.episode import Message
from agentrl.inference.template import ChatTemplate
from agentrl.inference.tool_parsers import ParsedAnswer, parser_for
from tests.inference.parser_cases import Calls

CONTENT, REASONING = "I look it up.", "First the city, then the day."
_USER: Message = {"role": "user", "content": "Which one?"}
_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", str: "string"}
_THOUGHT_TAGS = re.compile(r"\s*<[^<>]*think[^<>]*>.*\Z", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Turn:
    """A message as a template renders it.

    Attributes:
        text: What a model would have sampled, without the token that ends the turn.
        calls: Names and arguments of the message's calls.
        tools: Schemas of the tools that the calls name.
    """

    text: str
    calls: Calls
    tools: list[dict[str, Any]]


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    """Schemas of tools that take these arguments; a tool that is called twice takes the arguments of both calls."""
    types: dict[str, dict[str, Any]] = {name: {} for name, _ in calls}
    for name, arguments in calls:
        for key, value in arguments.items():
            types[name][key] = {"type": _TYPES.get(type(value), "null"), "description": "x"}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Looks it up.",
                "parameters": {"type": "object", "properties": properties, "required": []},
            },
        }
        for name, properties in types.items()
    ]


def rendered(template: ChatTemplate, calls: Calls, ends: Sequence[str], said: Message | None = None) -> Turn:
    """Renders a message with calls, and with content and reasoning beside them where the template takes both.

    Args:
        template: Chat template.
        calls: Names and arguments.
        ends: Texts of the tokens that end a turn.
        said: Content and reasoning, if they are not to be all that the template takes.
    """
    tools = tools_for(calls)
    thought: Message = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), REASONING)
    shapes = [said] if said is not None else [{"content": CONTENT, **thought}, {"content": "", **thought}]
    failure: Exception | None = None
    for shape in shapes:
        try:
            return Turn(_turn(template, {**shape, **_message(calls)}, tools, ends), calls, tools)
        except JinjaError as error:
            failure = error
    raise AssertionError(f"the template renders no call: {failure}")


def parsed(template: ChatTemplate, turn: Turn) -> ParsedAnswer:
    """Parses a turn with the parser that belongs to the template."""
    return parser_for(template.source).parse(turn.text, turn.tools)


def assert_comes_back(template: ChatTemplate, turn: Turn) -> None:
    """Asserts that calls, content and reasoning of a rendered turn are parsed as they were given."""
    answer = parsed(template, turn)
    found = [(call.name, json.loads(call.arguments) if call.error is None else call.error) for call in answer.calls]
    assert found == turn.calls, turn.text
    assert answer.content == (CONTENT if CONTENT in turn.text else ""), turn.text
    assert answer.reasoning == (REASONING if REASONING in turn.text else None), turn.text


def _message(calls: Calls) -> Message:
    ids = [f"call0000{at}" for at in range(len(calls))]
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in zip(ids, calls, strict=True)
        ],
    }


def _turn(template: ChatTemplate, message: Message, tools: list[dict[str, Any]], ends: Sequence[str]) -> str:
    prompt = _render(template, [_USER], tools, generation=True)
    whole = _render(template, [_USER, message], tools, generation=False)
    if not whole.startswith(prompt):  # the prompt opens a thought, or closes one, that the message does not have
        prompt = _THOUGHT_TAGS.sub("", prompt)
    assert whole.startswith(prompt), (prompt[-80:], whole[-400:])
    text = whole[len(prompt) :]
    return text[: max((at for end in ends if (at := text.rfind(end)) >= 0), default=len(text))]


def _render(template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]], *, generation: bool) -> str:
    return template.tokenizer.apply_chat_template(
        template.call_form.given(messages), tokenize=False, add_generation_prompt=generation, tools=tools
    )
