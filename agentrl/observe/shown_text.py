"""Writes any text and any bytes so that a terminal shows all of it and obeys none of it.

Guarantees: control characters, half surrogate pairs and bytes that are no UTF-8 come out as escapes, so sampled text
can neither move the cursor nor end the program with an encoding error.
"""

SPACE = "␣"


def plain(text: str) -> str:
    """Returns a text with its line breaks and tabs, and with every other unprintable character escaped."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _escape(c) for c in text)


def quoted(data: bytes) -> str:
    r"""Returns the bytes of a token as one line: spaces as ``␣``, line breaks as ``\n``, broken UTF-8 as ``\xf0``."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(SPACE if c == " " else c if c.isprintable() and c != "\\" else _escape(c) for c in text)


def _escape(letter: str) -> str:
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as ``surrogateescape`` decodes it
        return f"\\x{code - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")
