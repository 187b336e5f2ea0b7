"""Tells what a chat template and a tokenizer make of each other, by encoding one dummy conversation.

Guarantees: where a conversation that is encoded turn by turn gets other ids than the same conversation encoded as a
whole, this is told with the number of ids and the property of the tokenizer that causes it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.core.dummy_turn import SAID, SENTINEL, USER
from agentrl.core.episode import Message
from agentrl.core.template_marks import Marks, TemplateError, Tokenizer
from agentrl.core.turn_ends import TurnEnds
from agentrl.inference.encoding import TextEncoder

_ANSWER: Message = {"role": "assistant", "content": "yes"}  # a word, as most answers end with one
_NEXT: Message = {"role": "user", "content": "more"}


class Template(Protocol):
    """The part of a chat template that is needed here."""

    tokenizer: Tokenizer
    encoder: TextEncoder
    turn_ends: TurnEnds
    stop_texts: tuple[str, ...]
    eos_id: int

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first messages and the generation prompt."""
        ...

    def render(self, messages: Sequence[Message], *, generation: bool) -> str:
        """Text of messages."""
        ...

    def following(self, messages: Sequence[Message], *, answered: Message, answer_ids: Sequence[int]) -> list[int]:
        """Ids that continue a conversation."""
        ...


def template_notes(template: Template) -> tuple[str, ...]:
    """Returns what a user must know about this template with this tokenizer, one line each."""
    found = [_about_end(template), _about_begin(template), _about_prompt(template), _about_following(template)]
    return tuple(note for note in found if note)


def _about_end(template: Template) -> str:
    """A turn's end that is no token."""
    ends = template.turn_ends
    if ends.closing is not None:
        return ""
    if ends.word:
        count = len(template.encoder.ids(ends.word))
        return (
            f"this chat template ends an assistant's turn with {ends.word!r}, which is no token of the model's "
            f"tokenizer ({count} ids): answers stop at this text. Use a template that ends turns with a token of the "
            "model (model.chat_template), or add the token to the tokenizer"
        )
    if ends.texts:
        texts = " or ".join(map(repr, ends.texts))
        return (
            f"this chat template ends an assistant's turn with no token: answers stop at the text {texts}, the "
            "heading of the next turn, or at the model's own end token, which the template would not render; where a "
            "token joins two turns, the ids differ from those of the whole conversation"
        )
    return (
        "this chat template marks no end of an assistant's turn: answers stop at the model's own end token only, which "
        "the template would not render; with a model that was not trained to end there, set "
        "model.chat_template=chatml_tools and train it first"
    )


def _about_begin(template: Template) -> str:
    """A token that the tokenizer puts before each text, and the template leaves out."""
    tokenizer: Any = template.tokenizer
    begin = getattr(tokenizer, "bos_token_id", None)
    if begin is None or list(tokenizer.encode("a"))[:1] != [begin] or template.first([USER])[:1] == [begin]:
        return ""
    return (
        f"the tokenizer begins each text with {tokenizer.bos_token!r}, and this chat template does not: the model "
        "reads conversations without the token that it was trained to begin with"
    )


def _about_prompt(template: Template) -> str:
    """A generation prompt that the tokenizer joins with the answer."""
    prompt = template.render([USER], generation=True)
    whole = template.render([USER, _ANSWER], generation=False)
    if not whole.startswith(prompt):
        return ""  # the template renders an earlier turn in another way, see `ChatTemplate.rewrites`
    first, ids = template.encoder.ids(prompt), template.encoder.ids(whole)
    if ids[: len(first)] == first:
        return ""
    same = next(place for place, (one, other) in enumerate(zip(first, ids, strict=False)) if one != other)
    return (
        f"the generation prompt of this chat template ends in {prompt[-12:]!r}, and the tokenizer joins its end with "
        f"the answer's beginning: in each turn {len(first) - same} of the ids differ from those of the whole "
        "conversation"
    )


def _about_following(template: Template) -> str:
    """Ids that a conversation encoded turn by turn has more, fewer or other than the whole."""
    try:
        whole = template.render([USER, SAID, _NEXT], generation=True)
        closing = template.turn_ends.closing
        sampled = [closing] if closing is not None and _is_in(template, closing, whole) else []
        added = template.following([_NEXT], answered=SAID, answer_ids=sampled)
    except TemplateError:
        return ""  # such a conversation is refused when an agent has one
    ids = template.encoder.ids(whole)
    expected = ids[_place(template, whole, ids) :]
    if added == expected:
        return ""
    return (
        f"{_reason(template)}: where a conversation goes on, {_changed(added, expected)} of each turn's ids differ "
        "from those that the tokenizer gives for the whole conversation, which other programs send"
    )


def _is_in(template: Template, closing: int, whole: str) -> bool:
    """Whether the token stands behind the dummy answer; gpt-oss ends an earlier turn with another one than the last."""
    return Marks(template.tokenizer, [closing]).first(whole.partition(SENTINEL)[2]) is not None


def _place(template: Template, whole: str, ids: list[int]) -> int:
    """Position in ``ids`` behind the end of the dummy answer."""
    before = template.encoder.ids(whole[: whole.index(SENTINEL) + len(SENTINEL)])
    closing = template.turn_ends.closing
    start = next((i for i, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), len(before))
    if closing is None:
        return start
    return ids.index(closing, start) + 1 if closing in ids[start:] else start


def _changed(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of ids between the first and the last difference, in the longer list."""
    shortest = min(len(one), len(other))
    start = next((i for i in range(shortest) if one[i] != other[i]), shortest)
    end = next((i for i in range(shortest - start) if one[-1 - i] != other[-1 - i]), shortest - start)
    return max(len(one), len(other)) - start - end


def _reason(template: Template) -> str:
    """The property of the tokenizer that makes pieces differ from the whole."""
    closing = template.turn_ends.closing
    if closing is None:
        return "the tokenizer joins the end of an answer with the text after it"
    token = getattr(template.tokenizer, "added_tokens_decoder", {}).get(closing)
    flags = [name for name in ("single_word", "lstrip", "rstrip", "normalized") if getattr(token, name, False)]
    word = getattr(token, "content", closing)
    return f"the tokenizer does not read {word!r} ({', '.join(flags) or 'no flags'}) as a token inside of a text"
