"""Reads single keys from the terminal.

Guarantees: the terminal is as before afterwards, also after an exception; Ctrl-C still ends the program.
"""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape", "\x04": "q", " ": " ",
}  # fmt: skip
_ESCAPE_SECONDS = 0.05  # the rest of an escape sequence comes at once


@contextmanager
def raw_terminal() -> Iterator[None]:
    """Gives keys as they are pressed, until the block ends."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def read_key() -> str:
    """Waits for a key; returns its letter or its name, ``q`` at the end of the input."""
    file = sys.stdin.fileno()
    data = os.read(file, 1)
    if not data:
        return "q"
    if data == b"\x1b":
        while select.select([file], [], [], _ESCAPE_SECONDS)[0]:
            data += os.read(file, 1)
            if (data[-1:].isalpha() and len(data) > 2) or data.endswith(b"~"):
                break
    while data[0] >= 0xC0 and len(data) < _letter_size(data[0]):
        data += os.read(file, 1)
    text = data.decode("utf-8", "replace")
    return NAMES.get(text, text)


def _letter_size(first: int) -> int:
    """Returns the number of bytes of a letter in UTF-8, by its first byte."""
    return 2 if first < 0xE0 else 3 if first < 0xF0 else 4
