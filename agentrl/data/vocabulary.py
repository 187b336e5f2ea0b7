"""Compares the vocabularies of two tokenizers.

Guarantees: only the tokenizers' files are read, without torch or transformers; ids are compared, not text splitting.
"""

from pathlib import Path

from agentrl.config.errors import DataError

TOKENIZER = "tokenizer.json"


def vocabulary(file: Path) -> dict[str, int]:
    """Maps each token to its id, special tokens included.

    Args:
        file: Path of a ``tokenizer.json``.

    Raises:
        DataError: There is no such file.
    """
    from tokenizers import Tokenizer

    if not file.is_file():
        raise DataError(f"{file.parent} has no {file.name}, by which its tokens could be compared with the policy's")
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)


def disagreements(ours: Path, theirs: Path) -> list[tuple[str, int, int | None]]:
    """Lists tokens of ``ours`` with another id, or ``None``, in ``theirs``: token, our id, their id."""
    known = vocabulary(theirs)
    wrong = [(token, index, known.get(token)) for token, index in vocabulary(ours).items() if known.get(token) != index]
    return sorted(wrong, key=lambda entry: entry[1])
