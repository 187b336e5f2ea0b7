"""Dummy assistant turns, which show what a chat template puts around an assistant's text.

Guarantees: the text after the sentinel in a rendered conversation is the template's own and that of the messages which
follow; nothing depends on what an assistant says.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.template_marks import TemplateError

SENTINEL = "agentrl0said0this"  # stands for the assistant's text in a dummy turn; occurs in no template
USER: Message = {"role": "user", "content": "a"}
SAID: Message = {"role": "assistant", "content": SENTINEL}
CALL_ID = "call00000"  # nine letters and digits, as Mistral's templates want


def tool_result(content: str, call_id: str = CALL_ID) -> Message:
    """A tool result that answers the dummy call."""
    return {"role": "tool", "name": "f", "tool_call_id": call_id, "content": content}


def call_for(result: Message, answered: Message) -> dict[str, Any]:
    """A tool call that a tool result answers, with the sentinel as its argument.

    Args:
        result: The tool result.
        answered: The assistant message that called; it names the tool.
    """
    call_id = result.get("tool_call_id") or CALL_ID
    names = {call.get("id"): (call.get("function") or {}).get("name") for call in answered.get("tool_calls", ())}
    name = names.get(call_id) or result.get("name") or "f"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": SENTINEL}}}


def calling(results: Sequence[Message], answered: Message) -> Message:
    """An assistant message with the calls that these results answer."""
    return {"role": "assistant", "content": "", "tool_calls": [call_for(result, answered) for result in results]}


def tail(rendered: str, said: Message) -> str:
    """Returns the text after the sentinel, which a tool result may repeat.

    Raises:
        TemplateError: The template leaves out the assistant's text.
    """
    words = max(len(said.get("tool_calls", ())), 1)
    parts = rendered.split(SENTINEL, words)
    if len(parts) <= words:
        raise TemplateError("this chat template leaves out the assistant's text")
    return parts[-1]
