"""Shows chat messages to a person.

Guarantees: a message is shown in full: its reasoning, its text, with ``[image]`` for an image, every tool call and
every call's error; no markup and no control character in it is obeyed.
"""

from rich.text import Text

from agentrl.core.episode import Message
from agentrl.core.images import shown_text
from agentrl.observe.shown_text import plain

COLORS = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def message_text(message: Message) -> Text:
    """Returns a message as lines: its role and text, with reasoning dimmed and each call as ``name(arguments)``."""
    role = str(message.get("role"))
    shown = Text()
    shown.append(f"{plain(role)}: ", style=COLORS.get(role, "white"))
    lines: list[tuple[str, str]] = []
    if message.get("reasoning_content"):
        lines.append((str(message["reasoning_content"]), "dim"))
    if message.get("content"):
        lines.append((shown_text(message["content"]), ""))
    lines += [(line, "") for line in call_lines(message)]
    lines += [(f"malformed call: {line}", "red") for line in error_lines(message)]
    for number, (line, style) in enumerate(lines):
        shown.append("\n" * bool(number) + plain(line), style=style)
    return shown


def call_lines(message: Message) -> list[str]:
    """Returns each tool call of a message as ``name(arguments)``."""
    functions = (call.get("function") or {} for call in message.get("tool_calls") or [])
    return [f"{function.get('name')}({function.get('arguments')})" for function in functions]


def error_lines(message: Message) -> list[str]:
    """Returns why calls of a message are malformed, one line each."""
    calls = message.get("tool_calls") or []
    return [str(call["error"]) for call in calls if call.get("error")]
