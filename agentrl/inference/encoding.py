"""Encodes text with a model's tokenizer, also text that continues other text.

Guarantees: no text is cut or padded, whatever limits the tokenizer was saved with; special tokens in a text become
their ids. Text that continues other text gets the ids that it has there: without a word mark of its own
(``prepend_scheme=first``), and without the white space that the token before it takes in (``rstrip``).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from agentrl.core.episode import Message

_SAMPLE = "a <b>\nc </s> d"  # on this the fast way must give the ids that the tokenizer gives
_CONTEXTS = ("a", ".", "0")  # text that few tokenizers join with what follows it
_CONTEXT_LENGTH = 64  # characters; what lies further back has no influence


class TemplateError(ValueError):
    """The model has no chat template, or one that cannot be continued, or that leaves out what it is given."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    eos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """Render messages."""
        ...

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any:
        """Text of ids."""
        ...


class TextEncoder:
    """Encodes text, alone or after other text.

    Args:
        tokenizer: The model's tokenizer. Limits and padding of its backend are turned off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if getattr(tokenizer, "split_special_tokens", False):
            raise TemplateError(
                "the model's tokenizer has split_special_tokens=true, so the special tokens of its chat template would "
                "be encoded as text: remove this from tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        if fast is not None:
            fast.no_truncation()  # both can be saved in tokenizer.json; `encode` of the backend heeds them
            fast.no_padding()
            if fast.encode(_SAMPLE, add_special_tokens=False).ids != self.ids_of_tokenizer(_SAMPLE):
                fast = None
        self._fast = fast  # faster: transformers always encodes a batch

    def ids(self, text: str) -> list[int]:
        """Ids of a text that stands alone."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self.ids_of_tokenizer(text)

    def ids_of_tokenizer(self, text: str) -> list[int]:
        """Ids of a text through the tokenizer itself, without those that it puts around a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def after(self, before: str, text: str) -> list[int]:
        """Ids of ``text`` where it follows ``before``; an empty ``before`` stands for any text.

        Where a token would span the border, ``text`` gets the ids that it has after text which joins with nothing.
        """
        for context in (before[-_CONTEXT_LENGTH:], *_CONTEXTS) if before else _CONTEXTS:
            known = self.ids(context)
            whole = self.ids(context + text)
            if whole[: len(known)] == known:
                return whole[len(known) :]
        return self.ids(text)


class Mark(NamedTuple):
    """An added token that was found in a text.

    Attributes:
        start: Position of its first character.
        end: Position after its last character.
        id: The token.
    """

    start: int
    end: int
    id: int


class Marks:
    """Finds added tokens in text by their names.

    Args:
        tokenizer: The model's tokenizer.
        ids: Tokens to find.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Iterable[int]) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._words: dict[int, str] = {}
        for token in ids:
            word = added[token].content if token in added else tokenizer.decode([token], skip_special_tokens=False)
            if word.strip():
                self._words[token] = word

    def first(self, text: str, start: int = 0) -> Mark | None:
        """Finds the first of the tokens from a position on, the longest if several begin there."""
        found: Mark | None = None
        for token, word in self._words.items():
            at = text.find(word, start)
            if at >= 0 and (found is None or (at, -len(word)) < (found.start, found.start - found.end)):
                found = Mark(at, at + len(word), token)
        return found

    def word(self, token: int) -> str:
        """Text of one of the tokens; empty for one that has none."""
        return self._words.get(token, "")
