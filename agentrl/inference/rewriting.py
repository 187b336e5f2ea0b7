"""Finds out whether a chat template renders earlier turns differently once messages follow.

Guarantees: what stands before an assistant's text is compared with and without the messages that follow it, for each
kind of turn that a conversation may hold, with reasoning in the text and in a field of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from agentrl.core.dummy_turn import SENTINEL, USER, call_for, tool_result
from agentrl.core.episode import Message
from agentrl.core.template_marks import TemplateError

Render = Callable[..., str]
"""``render(messages, generation=..., tools=...)``: the template's text of messages."""

Tools = Sequence[dict[str, Any]]
REWRITES = (
    "this chat template rewrites earlier turns when messages are added (it drops their reasoning, or moves the tools "
    "or the system message to the last one), so the sampled conversation differs from the rendered one. Set "
    "inference.history=append (keep the sampled ids), inference.history=branch (render again, each turn is its own "
    "sequence), or model.chat_template=training (a template that keeps reasoning); single-turn workflows are not "
    "affected"
)
_REASONED: tuple[Message, ...] = (  # templates find reasoning in the text, or in a field of its own
    {"content": f"<think>\nr\n</think>\n\n{SENTINEL}"},
    {"content": SENTINEL, "reasoning_content": "r", "thinking": "r"},
)
_SYSTEM: Message = {"role": "system", "content": "agentrl0told0this"}  # these texts occur in no template
_MORE: Message = {"role": "user", "content": "agentrl0more0said"}  # another than before: templates compare messages


def rewrites_turns(render: Render, is_result: bool, with_tools: bool, has_system: bool, tools: Tools) -> bool:
    """Whether the template renders earlier turns differently when messages of a kind follow.

    Args:
        render: Renders messages; raises :class:`TemplateError` for those that the template cannot render, which are
            refused when an agent sends them.
        is_result: Whether results of tools alone follow, rather than a user's message.
        with_tools: Whether earlier turns may hold calls.
        has_system: Whether the conversation begins with a system message.
        tools: Tools of the conversation.
    """
    cases = _continuations(is_result, with_tools)
    changes = any(_changes(render, *case, tools) for case in cases)
    return changes or (has_system and any(_loses_system(render, *case, tools) for case in cases))


def _changes(render: Render, turns: list[Message], after: list[Message], tools: Tools) -> bool:
    """Whether the beginning of the last of these turns is rendered differently when messages follow."""
    try:
        shorter = render(turns, generation=False, tools=tools)
        longer = render([*turns, *after], generation=False, tools=tools)
    except TemplateError:
        return False
    return shorter.partition(SENTINEL)[0] != longer.partition(SENTINEL)[0]


def _loses_system(render: Render, turns: list[Message], after: list[Message], tools: Tools) -> bool:
    """Whether a system message of the first prompt does not stand before the answer when messages follow."""
    try:
        first = render([_SYSTEM, turns[0]], generation=True, tools=tools)
        longer = render([_SYSTEM, *turns, *after], generation=True, tools=tools)
    except TemplateError:
        return False
    return _SYSTEM["content"] in first and _SYSTEM["content"] not in longer.partition(SENTINEL)[0]


def _continuations(is_result: bool, with_tools: bool) -> list[tuple[list[Message], list[Message]]]:
    """Dummy turns whose last holds reasoning, and messages that may follow them."""
    result = tool_result("b")
    found: list[tuple[list[Message], list[Message]]] = []
    for reasoned in _REASONED:
        said: Message = {"role": "assistant", **reasoned}
        called = {**said, "tool_calls": [call_for(result, {})]}
        if is_result:
            found.append(([USER, called], [result]))
            continue
        found.append(([USER, said], [_MORE]))
        if with_tools:
            answer: Message = {"role": "assistant", "content": "c"}
            found += [([USER, called], [result, _MORE]), ([USER, called], [result, answer, _MORE])]
    return found
