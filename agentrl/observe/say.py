"""Prints messages of a run."""

from rich.console import Console


def say(console: Console, text: str, style: str = "") -> None:
    """Prints text as it is, without markup: folded between words in a terminal, in one line elsewhere."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)
