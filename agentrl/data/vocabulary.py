"""Compares the vocabularies of two tokenizers.

Guarantees: read from the tokenizers' own files, without torch or transformers; only ids count, not how a text is split.
"""

from pathlib import Path

from agentrl.config.errors import DataError

TOKENIZER = "tokenizer.json"


def vocabulary(file: Path) -> dict[str, int]:
    """Id of each token, special ones included.

    Args:
        file: A ``tokenizer.json``.

    Raises:
        DataError: There is no such file.
    """
    from tokenizers import Tokenizer

    if not file.is_file():
        raise DataError(f"{file.parent} has no {file.name}, by which its tokens could be compared with the policy's")
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)


def disagreements(ours: Path, theirs: Path) -> list[tuple[str, int, int | None]]:
    """Tokens of ours that are not theirs: the token, our id, and theirs or ``None``; theirs may know more tokens."""
    known = vocabulary(theirs)
    wrong = [(token, index, known.get(token)) for token, index in vocabulary(ours).items() if known.get(token) != index]
    return sorted(wrong, key=lambda entry: entry[1])
