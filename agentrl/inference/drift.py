"""Measures the difference between stored ids and the chat template's render of the same messages.

Guarantees: a difference at special tokens (roles, ends of turns, tool-call marks) is distinguished from a difference in
how text is split into tokens. The first means that the model is trained on a conversation that it will never see; the
second is normal, because models do not always split text as their tokenizer does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.episode import Message
from agentrl.inference.template import ChatTemplate, Tools


@dataclass(frozen=True)
class Drift:
    """Difference between stored and rendered ids of one conversation.

    Attributes:
        special: Whether the special tokens differ.
        text: Share of the ids that lie between the first and the last difference, in ``[0, 1]``.
    """

    special: bool
    text: float


def measure(template: ChatTemplate, token_ids: Sequence[int], messages: Sequence[Message], tools: Tools) -> Drift:
    """Compare stored ids with the canonical render.

    Args:
        template: The model's chat template.
        token_ids: Stored ids of a conversation that ends with an assistant message, which may have been cut off.
        messages: Messages of the conversation.
        tools: Tool schemas of the conversation.

    Raises:
        TemplateError: The template cannot render the messages.
    """
    canonical = template.canonical(messages, tools)
    stored = list(token_ids)
    while canonical and canonical[-1] not in template.end_ids:
        canonical.pop()  # tokens after the last end of turn belong to the next turn
    special = template.special_ids
    kept, rendered = ([token for token in ids if token in special] for ids in (stored, canonical))
    if canonical and stored and stored[-1] not in template.end_ids:
        canonical.pop()  # the answer was cut off before its end of turn
        rendered = rendered[: len(kept)]  # and before the end of its thought or call, which the template closes
    return Drift(kept != rendered, _changed(stored, canonical))


def _changed(stored: Sequence[int], canonical: Sequence[int]) -> float:
    start = 0
    shortest = min(len(stored), len(canonical))
    while start < shortest and stored[start] == canonical[start]:
        start += 1
    end = 0
    while end < shortest - start and stored[-1 - end] == canonical[-1 - end]:
        end += 1
    return (max(len(stored), len(canonical)) - start - end) / max(len(stored), len(canonical), 1)
