"""Measures the difference between stored ids and the chat template's render of the same messages.

Guarantees: a difference in what was not sampled (special tokens, what the template puts between them, the messages of
users and tools) is distinguished from a difference in how an answer is split into tokens. The first means that the
model is trained on a conversation that it will never see; the second is normal, because models do not always split text
as their tokenizer does.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import compress

from agentrl.core.episode import Message
from agentrl.inference.template import ChatTemplate, Tools


@dataclass(frozen=True)
class Drift:
    """Difference between stored and rendered ids of one conversation.

    Attributes:
        special: Whether the special tokens differ, or one of the ids between them that the model did not sample: a
            line break more after the end of a turn, say.
        text: Share of the ids that lie between the first and the last difference, in ``[0, 1]``.
        left_out: Whether the message of an answer lacks special tokens that the model sampled in it.
    """

    special: bool
    text: float
    left_out: bool = False


def measure(
    template: ChatTemplate,
    token_ids: Sequence[int],
    messages: Sequence[Message],
    tools: Tools,
    sampled: Sequence[bool],
) -> Drift:
    """Compare stored ids with the canonical render.

    Args:
        template: The model's chat template.
        token_ids: Stored ids of a conversation that ends with an assistant message, which may have been cut off.
        messages: Messages of the conversation.
        tools: Tool schemas of the conversation.
        sampled: Whether the model sampled each stored id, ``[tokens]``.

    Raises:
        TemplateError: The template cannot render the messages.
    """
    text = template.shown.expanded(template.render(messages, generation=False, tools=tools), messages)
    canonical = template.encode(text.removesuffix(template.turn_ends.rest))
    stored = list(token_ids)
    is_cut = bool(stored) and stored[-1] not in template.end_ids  # before the end of its turn
    if template.turn_ends.closes and template.turn_ends.closing is not None:
        while canonical and canonical[-1] not in template.end_ids:
            canonical.pop()  # tokens after the last end of turn belong to the next turn
        if canonical and is_cut:
            canonical.pop()
    elif stored and not is_cut:
        stored.pop()  # the template does not render the end of the last turn
    given = _is_given(stored, sampled, canonical, template, is_cut)
    left_out = False
    if not given:  # without the special tokens that the model sampled inside its answer
        own = template.special_ids - template.end_ids
        kept = [not (mark and token in own) for token, mark in zip(stored, sampled, strict=False)]
        given = left_out = not all(kept) and _is_given(
            list(compress(stored, kept)), list(compress(sampled, kept)), canonical, template, is_cut
        )
    return Drift(not given, _changed(stored, canonical), left_out)


def _is_given(
    stored: Sequence[int], sampled: Sequence[bool], canonical: Sequence[int], template: ChatTemplate, is_cut: bool
) -> bool:
    """Whether special tokens, and what was not sampled between them, are as rendered."""
    known = _parts(stored, sampled, template.special_ids)
    rendered = _parts(canonical, [False] * len(canonical), template.special_ids)
    if is_cut:
        rendered = rendered[: len(known)]  # the template closes a thought or a call that was cut off
    same = [part.mark for part in known] == [part.mark for part in rendered]
    return same and all(_as_given(one, other.ids) for one, other in zip(known, rendered, strict=True))


@dataclass
class _Part:
    """A special token and the ids up to the next one.

    Attributes:
        mark: The special token; ``None`` at the beginning.
        inside: Whether the token was sampled before the end of an answer.
        ids: The ids after it.
        sampled: Whether each of them was sampled.
    """

    mark: int | None
    inside: bool = False
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)


def _parts(ids: Sequence[int], sampled: Sequence[bool], special: Container[int]) -> list[_Part]:
    parts = [_Part(None)]
    for place, (token, was_sampled) in enumerate(zip(ids, sampled, strict=False)):
        if token in special:
            parts.append(_Part(token, inside=was_sampled and sampled[place + 1 : place + 2] == [True]))
        else:
            parts[-1].ids.append(token)
            parts[-1].sampled.append(was_sampled)
    return parts


def _as_given(stored: _Part, rendered: Sequence[int]) -> bool:
    """Whether what was not sampled, before and after an answer in this part, is rendered with the same ids."""
    answered = [place for place, was_sampled in enumerate(stored.sampled) if was_sampled]
    if not answered:
        return stored.ids == list(rendered) or (stored.inside and not stored.ids)
    before, after = stored.ids[: answered[0]], stored.ids[answered[-1] + 1 :]
    end = len(rendered) - len(after)
    return len(before) <= end and before == list(rendered[: len(before)]) and after == list(rendered[end:])


def _changed(stored: Sequence[int], canonical: Sequence[int]) -> float:
    start = 0
    shortest = min(len(stored), len(canonical))
    while start < shortest and stored[start] == canonical[start]:
        start += 1
    end = 0
    while end < shortest - start and stored[-1 - end] == canonical[-1 - end]:
        end += 1
    return (max(len(stored), len(canonical)) - start - end) / max(len(stored), len(canonical), 1)
