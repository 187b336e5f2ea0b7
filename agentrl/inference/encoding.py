"""Encodes text with a model's tokenizer, also text that continues other text.

Guarantees: no text is cut or padded, whatever limits the tokenizer was saved with; special tokens in a text become
their ids. Text that continues other text gets the ids that it has there: without a word mark of its own
(``prepend_scheme=first``), and without the white space that the token before it takes in (``rstrip``).
"""

from typing import Any

from agentrl.core.template_marks import TemplateError, Tokenizer

_SAMPLE = "a <b>\nc </s> d"  # on this the fast way must give the ids that the tokenizer gives
_CONTEXTS = ("a", ".", "0")  # text that few tokenizers join with what follows it
_CONTEXT_LENGTH = 64  # characters; what lies further back has no influence


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
