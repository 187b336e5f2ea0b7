r"""Compares the final number of an answer exactly.

Guarantees: numbers are compared as fractions, so ``0.5`` equals ``1/2`` and nothing is rounded; an answer without a
number gets 0, never an error; a reference without a number raises. The number is taken after the last ``####``, else
from the last ``\boxed{...}``, else it is the last number of the text. ``50%`` is 50, as in GSM8K's references.
"""

import re
from fractions import Fraction

_MAX_DIGITS = 100  # longer ones are no real answers, and Python refuses to convert more than 4,300
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}(?!\w))?"
_VALUE = rf"(?:(?<![\w)])[-+])?{_DECIMAL}(?:\s*/\s*{_DECIMAL})?"
_LAST = re.compile(rf"(?<![\w.]){_VALUE}", re.ASCII)
_HASHES = re.compile(rf"####\s*({_VALUE})", re.ASCII)
_ANSWER_LINE = re.compile(rf"####\s*{_VALUE}\s*%?", re.ASCII)
_CURRENCY = re.compile(r"(-?)\\?[$£€]")
_FRACTION = re.compile(r"(\d)?\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_BOXED = r"\boxed{"


def final_number(text: str) -> Fraction | None:
    """Returns the number that an answer ends with.

    Args:
        text: The whole answer.

    Returns:
        The number; ``None`` if there is none.
    """
    text = _plain(text)
    hashes = _HASHES.findall(text)
    if hashes:
        return _value(hashes[-1])
    for part in (_last_boxed(text), text):
        numbers = _LAST.findall(part)
        if numbers:
            return _value(numbers[-1])
    return None


def numeric_reward(answer: str, reference: str) -> float:
    """Returns 1.0 if the final numbers of ``answer`` and ``reference`` are equal, else 0.0.

    Raises:
        TypeError: ``reference`` is not text.
        ValueError: ``reference`` has no number.
    """
    return float(final_number(answer) == reference_number(reference))


def reference_number(reference: str) -> Fraction:
    """Returns the number of a task's answer.

    Raises:
        TypeError: ``reference`` is not text: the task has no answer.
        ValueError: ``reference`` has no number.
    """
    if not isinstance(reference, str):
        raise TypeError(f"the reference answer is {reference!r}, a {type(reference).__name__}; want text with a number")
    expected = final_number(reference)
    if expected is None:
        raise ValueError(f"the reference answer {reference!r} has no number")
    return expected


def has_answer_line(text: str) -> bool:
    """Whether the last non-empty line is ``#### <number>`` and nothing else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return bool(lines) and _ANSWER_LINE.fullmatch(_plain(lines[-1]).strip()) is not None


def _plain(text: str) -> str:
    r"""Replaces currency signs, LaTeX spacing, ``\frac`` and typographic minus signs by plain text."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace(r"\,", "").replace(r"\!", "").replace(r"\%", "%")
    text = _CURRENCY.sub(r" \1", text)
    return _FRACTION.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return f"{whole} {above}/{below}" if whole else f"{above}/{below}"


def _last_boxed(text: str) -> str:
    r"""Returns the content of the last ``\boxed{...}``; empty if there is none or it is not closed."""
    start = text.rfind(_BOXED)
    depth = 1
    for position in range(start + len(_BOXED), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(_BOXED) : position]
    return ""


def _value(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    above, _, below = (part.strip() for part in text.replace(",", "").partition("/"))
    if not below:
        return Fraction(above)
    return Fraction(above) / Fraction(below) if Fraction(below) else None
