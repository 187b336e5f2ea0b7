"""Decides where an answer begins in a thought, and what of it is left when the thought is taken out.

Guarantees: whether the prompt opened a thought is read from the prompt's own ids, for each call; nothing is guessed
from the template or the answer.
"""

from collections.abc import Sequence, Set

from agentrl.core.template_marks import Tokenizer

TAIL = 32  # ids at the end of a prompt that hold its last tag, also where a tag is written letter by letter


def opens_thought(tail: str, thinking: tuple[str, str] | None) -> bool:
    """Whether a prompt ends in an open thought: in an opening tag, with nothing but white space after it.

    Args:
        tail: End of the prompt, decoded with special tokens.
        thinking: Opening and closing tag of the format.
    """
    if thinking is None:
        return False
    _, opening, after = tail.rpartition(thinking[0])
    return opening != "" and not after.strip()


def knows_tags(source: str, thinking: tuple[str, str] | None) -> bool:
    """Whether a chat template separates the reasoning itself; without tags, the format does it.

    A model whose template does not know the tags may be asked by a prompt to write them; then they are its answer.

    Args:
        source: The template's Jinja text.
        thinking: Opening and closing tag of the format.
    """
    return thinking is None or all(tag in source or _is_put_together(tag, source) for tag in thinking)


def _is_put_together(tag: str, source: str) -> bool:
    """Whether a template makes a tag of its name and a suffix, as Hunyuan's: ``'<think{}>'.format(':opensource')``."""
    name, _, suffix = tag.strip("<>").partition(":")
    return f"<{name}{{}}>" in source or (suffix != "" and name in source and suffix in source)


def without_special(text: str, token_ids: Sequence[int], tokenizer: Tokenizer, special_ids: Set[int]) -> str:
    """Removes the special tokens among the sampled ids from a text that was decoded with them."""
    decode = tokenizer.decode
    for token in special_ids & set(token_ids):
        if not decode([token], skip_special_tokens=True):
            text = text.replace(decode([token], skip_special_tokens=False), "")
    return text
