"""Finds out how a chat template ends an assistant's turn, by rendering dummy turns.

Guarantees: a turn of text and a turn of tool calls are looked at, each alone and with a message after it. An end that
is one token of the tokenizer is found as an id; any other end, and a turn that only the next turn's heading ends, as
text. A token that the template also puts inside a turn is no end.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.dummy_turn import SAID, SENTINEL, USER, call_for, calling, tail, tool_result
from agentrl.core.episode import Message
from agentrl.core.template_marks import Marks, TemplateError, Tokenizer

Render = Callable[..., str]
"""``render(messages, generation=...)``: the template's text of messages, with or without the generation prompt."""


@dataclass(frozen=True)
class TurnEnds:
    """Ends of an assistant's turn in a chat template.

    Attributes:
        closing: Token that ends a turn of text; ``None`` if text does.
        calling: Token that ends a turn of tool calls; ``None`` if text does, or if calls are not rendered.
        closes: Whether the end is part of the turn, rather than the beginning of the next one.
        rest: Text after that token at the end of a conversation, e.g. a line break.
        texts: Texts that end a turn where no token does; empty if nothing marks the end.
        word: The end of a turn as text, if the template has one that is no token, e.g. ``</s>`` under another
            model's tokenizer.
    """

    closing: int | None
    calling: int | None
    closes: bool
    rest: str = ""
    texts: tuple[str, ...] = ()
    word: str = ""

    @property
    def ids(self) -> list[int]:
        """Tokens that end a turn."""
        return [end for end in dict.fromkeys((self.closing, self.calling)) if end is not None]


def find_turn_ends(render: Render, tokenizer: Tokenizer, named: Collection[int]) -> TurnEnds:
    """Finds the ends of a turn.

    Args:
        render: Renders messages.
        tokenizer: The model's tokenizer.
        named: End tokens that the model's configuration names.

    Raises:
        TemplateError: The template cannot render an assistant's turn.
    """
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = Marks(tokenizer, {*named, *(token for token in added if added[token].special)})
    bare = tail(render([USER, SAID], generation=False), SAID)
    followed = _followed(render, [USER, SAID], SAID, [{"role": "user", "content": word} for word in ("a", "0")])
    closing = _closing(bare, followed, (special, Marks(tokenizer, added)), named)
    said = calling([tool_result("")], {})
    bare_calls = _rendered(render, [USER, said], said)
    followed_calls = _followed(render, [USER, said], said, [tool_result(word) for word in ("a", "0")])
    ends_calls = None if bare_calls is None else _calling(render, bare_calls, followed_calls, special)
    if closing is not None:
        closes, rest = _after(Marks(tokenizer, [closing]), bare)
        return TurnEnds(closing, ends_calls, closes, rest)
    word = bare.strip()
    headings = [_heading(bare, followed), "" if bare_calls is None else _heading(bare_calls, followed_calls)]
    texts = [word] if word else [text for text in headings if text.strip()]
    return TurnEnds(None, ends_calls, closes=bool(word), texts=tuple(dict.fromkeys(texts)), word=word)


def _rendered(render: Render, messages: Sequence[Message], said: Message, *, generation: bool = False) -> str | None:
    """Returns the text after the sentinel; ``None`` where the template cannot render these messages."""
    try:
        return tail(render(messages, generation=generation), said)
    except TemplateError:
        return None


def _followed(render: Render, turns: list[Message], said: Message, after: Iterable[Message]) -> list[str]:
    """Texts after the sentinel when each of these messages follows, of those that can be rendered."""
    texts = [_rendered(render, [*turns, message], said, generation=True) for message in after]
    return [text for text in texts if text is not None]


def _closing(bare: str, followed: list[str], kinds: Iterable[Marks], named: Container[int]) -> int | None:
    """Finds the token that ends a turn of text.

    Args:
        bare: Text after an assistant's text at the end of a conversation. It may hold more than the end of the turn.
        followed: The same where messages follow.
        kinds: Tokens to look for: special ones, then all.
        named: End tokens that the model's configuration names.
    """
    shared = _common([bare, *followed])
    for marks in kinds:
        for text in (shared, bare):
            run = _run(marks, text)
            if run:
                return next((token for token in run if token in named), run[-1])
        found = _next(marks, bare, followed)
        if found is not None:
            return found
    return None


def _after(marks: Marks, bare: str) -> tuple[bool, str]:
    """Whether a turn holds its end, and the text after it."""
    mark = marks.first(bare)
    return (False, "") if mark is None else (True, bare[mark.end :])


def _run(marks: Marks, text: str) -> list[int]:
    """The first token in a text, and those that follow it directly."""
    found: list[int] = []
    mark = marks.first(text)
    while mark is not None:
        found.append(mark.id)
        end = mark.end
        mark = marks.first(text, end)
        if mark is not None and mark.start != end:
            break
    return found


def _next(marks: Marks, bare: str, followed: list[str]) -> int | None:
    """The token that begins the next turn, if nothing ends this one."""
    rest = followed[0][len(bare) :] if followed and followed[0].startswith(bare) else ""
    mark = marks.first(rest)
    return mark.id if mark is not None and not rest[: mark.start].strip() else None


def _calling(render: Render, bare: str, followed: list[str], special: Marks) -> int | None:
    """Finds the token that ends a turn of tool calls: the last one, or the first of the next turn."""
    last: int | None = None
    ended = bare.rstrip()
    mark = special.first(bare)
    while mark is not None:
        last = mark.id if mark.end >= len(ended) else None
        mark = special.first(bare, mark.end)
    if last is None:
        return _next(special, bare, followed)
    return _next(special, bare, followed) if _separates(render, special.word(last)) else last


def _separates(render: Render, word: str) -> bool:
    """Whether a token stands after each of several calls, so that it does not end the turn."""
    one, two = tool_result(""), tool_result("", "call00001")
    counts = []
    for results in ([one], [one, two]):
        said: Message = {"role": "assistant", "content": "", "tool_calls": [call_for(r, {}) for r in results]}
        try:
            text = render([USER, said], generation=False)
        except TemplateError:
            return False  # the template takes one call at a time
        if text.count(SENTINEL) != len(results):
            return False
        counts.append(text.count(word))
    return counts[0] != counts[1]


def _heading(bare: str, followed: list[str]) -> str:
    r"""The text between a turn and the next one's content, e.g. ``\n\nUser:``."""
    shared = _common(followed) if len(followed) > 1 else ""
    return shared[len(bare.rstrip()) :].rstrip() if shared.startswith(bare) else ""


def _common(texts: Sequence[str]) -> str:
    """The text with which all of these begin."""
    first, last = min(texts), max(texts)
    return first[: next((i for i, letter in enumerate(first) if letter != last[i]), len(first))]
