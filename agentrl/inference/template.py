"""Chat templates: from new messages to new ids, never re-encoding what is stored.

Guarantees: ids of a continuation are the difference between two renders of which the shorter must be a prefix of the
longer; a template that breaks this is refused by name. What the template puts after an end-of-turn token is found by
probing it.
"""

from pathlib import Path
from typing import Any, Protocol

from agentrl.core.episode import Message


class TemplateError(ValueError):
    """The model has no chat template, or one that cannot be continued."""


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


class ChatTemplate:
    """Renders messages with a model's own template.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise TemplateError(
                "the model's tokenizer has no chat template: use an instruct model, or set tokenizer.chat_template "
                "and save it"
            )
        if tokenizer.eos_token is None or tokenizer.eos_token_id is None:
            raise TemplateError("the model's tokenizer has no end-of-sequence token")
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self._eos: str = tokenizer.eos_token
        self._probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self._closed = self._render(self._probe, generation=False)
        _, found, after = self._closed.rpartition(self._eos)
        self._after_turn = after if found else ""  # a newline in ChatML
        self._template_closes_turn = bool(found)

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """Template of the tokenizer saved in ``folder``."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(folder)))

    def first(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation's first messages and the generation prompt."""
        return self._encode(self._render(messages, generation=True))

    def following(self, messages: list[Message], *, turn_closed: bool) -> list[int]:
        """Ids that continue a conversation after an assistant message.

        Args:
            messages: New messages.
            turn_closed: Whether the stored ids end with the end-of-turn token; otherwise it comes first here.

        Returns:
            The rest of the last turn, the new messages and the generation prompt.
        """
        longer = self._render([*self._probe, *messages], generation=True)
        if not longer.startswith(self._closed):
            raise TemplateError(
                "this chat template rewrites earlier turns when messages are added, so a conversation cannot be "
                "continued token by token; single-turn workflows are not affected"
            )
        text = self._after_turn + longer[len(self._closed) :]
        if not turn_closed and self._template_closes_turn:
            text = self._eos + text
        return self._encode(text)

    def text(self, token_ids: list[int]) -> str:
        """What was said: the ids without the end-of-turn token, decoded without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _render(self, messages: list[Message], *, generation: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
