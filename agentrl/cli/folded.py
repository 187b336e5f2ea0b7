"""Lines of plain text that fit the terminal."""

import shutil
import sys
import textwrap
from collections.abc import Sequence


def terminal_width() -> int | None:
    """Returns the columns of the terminal that standard output goes to; ``None`` if it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def folded(lines: Sequence[str], indent: str) -> list[str]:
    """Folds lines that are wider than the terminal between words; elsewhere they stay as they are.

    Args:
        lines: Lines of text.
        indent: Beginning of each continued line.
    """
    width = terminal_width()
    if width is None:
        return list(lines)
    return [part for line in lines for part in _fold(line, width, indent)]


def _fold(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, tabsize=1) or [""]
