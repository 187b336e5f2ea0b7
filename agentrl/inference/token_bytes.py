"""Reads single token ids as the bytes that they stand for.

Guarantees: the bytes of ids in a row, joined, are the text that the tokenizer decodes them to, also where one character
is split over several ids, and where a tokenizer marks the beginning of a word instead of the space before it.
"""

import re
from typing import Any

_REPLACED = "\ufffd"  # what decoders put for bytes that are no character yet
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of token ids.

    Args:
        tokenizer: A tokenizer of Hugging Face.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        before = tokenizer.encode("a", add_special_tokens=False)
        self._before = before[-1:]  # decoders leave out the space of the first token
        self._start = len(self._decode(self._before))
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Returns the bytes of one id."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        text = self._decode([*self._before, token])[self._start :]
        if _REPLACED not in text:
            return text.encode("utf-8", "surrogatepass")
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        fallback = _BYTE.fullmatch(name)
        if fallback:
            return bytes.fromhex(fallback[1])
        if all(letter in BYTE_OF_LETTER for letter in name):
            return bytes(BYTE_OF_LETTER[letter] for letter in name)
        return text.encode("utf-8", "surrogatepass")

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()
"""Letter of a byte-level tokenizer's vocabulary -> the byte that it stands for."""
