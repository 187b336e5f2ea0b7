"""Worked tool calls for prompts: what a small model needs to see before it writes a call itself.

Guarantees: the messages are those of a real episode (question, call, result, answer), so the chat template renders the
example exactly as it renders the model's own calls.
"""

import json
import zlib
from typing import Any

from agentrl.core.episode import Message


def worked_call(question: str, tool: str, arguments: dict[str, Any], result: Any, answer: str) -> list[Message]:
    """Returns an example of a solved task with one tool call, to be put before the real question.

    Args:
        question: Content of the user message that poses the example.
        tool: Name of the tool.
        arguments: Arguments of the call.
        result: Result of the call; whatever is no text is shown as JSON, as results of tools are.
        answer: The assistant's final answer.
    """
    text = json.dumps(arguments)
    call_id = f"ex{zlib.crc32(text.encode()) % 10**7:07d}"  # nine letters and digits, as some templates demand
    call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": text}}
    shown = result if isinstance(result, str) else json.dumps(result)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": tool, "content": shown},
        {"role": "assistant", "content": answer},
    ]
