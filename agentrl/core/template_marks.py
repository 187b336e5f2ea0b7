"""What chat templates and tokenizers have in common for all that reads them: added tokens in text, and the error.

Guarantees: a token is found by its name, the longest where several begin; one that is written as white space is not
looked for. Importing this needs neither torch nor transformers.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from agentrl.core.episode import Message


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
