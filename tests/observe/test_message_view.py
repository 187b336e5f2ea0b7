"""Chat messages as a person reads them."""

import io
from typing import Any

from rich.console import Console

from agentrl.observe.message_view import message_text


def shown(message: dict[str, Any], *, color: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=color, color_system="standard" if color else None).print(
        message_text(message)
    )
    return out.getvalue()


def test_all_of_a_message_is_shown() -> None:
    calls = [
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "", "arguments": "{"}, "error": "not JSON"},
    ]
    text = shown({"role": "assistant", "content": "so:", "reasoning_content": "let me see", "tool_calls": calls})
    assert text == 'assistant: let me see\nso:\nadd({"a": 1})\n({)\nmalformed call: not JSON\n'


def test_reasoning_is_dimmed_and_an_error_is_red() -> None:
    calls = [{"function": {"name": "f", "arguments": "{"}, "error": "not JSON"}]
    text = shown({"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": calls}, color=True)
    assert text == "\x1b[32massistant: \x1b[0m\x1b[2mr\x1b[0m\nc\nf({)\n\x1b[31mmalformed call: not JSON\x1b[0m\n"


def test_markup_and_control_characters_are_text() -> None:
    assert shown({"role": "tool", "content": "[red]a[/red] :smile: \x1b[2J"}) == "tool: [red]a[/red] :smile: \\x1b[2J\n"


def test_a_message_without_anything_shows_its_role() -> None:
    assert shown({"role": "assistant", "content": None}) == "assistant: \n"
