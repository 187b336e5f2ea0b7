r"""Compares the final number of an answer exactly.

Guarantees: numbers are compared as fractions, so ``0.5`` equals ``1/2`` and nothing is rounded; an answer without a
number gets 0, never an error; a reference without a number raises. The number is the one after the last ``####``, else
the one in the last ``\boxed{...}``, else the last of the text. A box that holds no number or several (``(1,2)``,
``3 + 4``) has no final number; of an equation it is the right side. How a number is written is up to
:mod:`agentrl.rewards.number_text`.
"""

import re
from fractions import Fraction

from agentrl.rewards.number_text import NumberFound, find_numbers
from agentrl.rewards.plain_text import plain_text

_HASHES = re.compile(r"####[ \n]?(?:\*\*)?[ ]?")
_BOX = re.compile(r"\\(?:boxed|fbox) ?\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGIT = re.compile("[\\d\u00bc-\u00be\u2150-\u218b]")  # also the fractions that are one character
_OPERATORS = "+-*/÷^"
_LONGEST = 400  # characters that a number and its surroundings have at most


def final_number(text: str) -> Fraction | None:
    """Returns the number that an answer ends with.

    Args:
        text: The whole answer.

    Returns:
        The number; ``None`` if there is none.
    """
    marked = _last_marked(text)
    if marked is not None:
        return marked.value
    boxed = last_boxed(text)
    if boxed is not None:
        return only_number(boxed)
    return _last_number(text)


def _last_marked(text: str) -> NumberFound | None:
    """Returns :func:`marked_number` of a text; looks at what follows the last ``####`` first, as it mostly is there."""
    last = text.rfind("####")
    if last < 0:
        return None
    return marked_number(plain_text(text[last : last + _LONGEST])) or marked_number(plain_text(text))


def _last_number(text: str) -> Fraction | None:
    """Returns the last number; a long text is read from its end, so that an answer of a megabyte holds nobody up."""
    size = 4 * _LONGEST
    if not _DIGIT.search(text):
        return None
    while True:
        numbers = find_numbers(plain_text(text[-size:]))
        if size >= len(text) or (numbers and numbers[-1].start > _LONGEST):
            return numbers[-1].value if numbers else None
        size *= 4


def marked_number(plain: str) -> NumberFound | None:
    """Returns the number directly after the last ``####`` that has one; ``None`` if there is none."""
    marks = {match.end() for match in _HASHES.finditer(plain)}
    marked = [number for number in find_numbers(plain) if number.start in marks] if marks else []
    return marked[-1] if marked else None


def only_number(text: str) -> Fraction | None:
    """Returns the number of a box: the only one in it, or in the right side of its equation; else ``None``."""
    plain = plain_text(text).strip()
    plain = plain[:1] + plain[1:].lstrip() if plain[:1] in ("-", "+") else plain
    numbers = find_numbers(plain)
    if len(numbers) > 1 and "=" in plain:
        plain = plain.rpartition("=")[2]
        numbers = find_numbers(plain)
    if len(numbers) != 1 or numbers[0].listed or _is_operand(plain, numbers[0]):
        return None
    return numbers[0].value


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``; ``None`` if there is none or it is not closed."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
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
    if not lines or not lines[-1].startswith("####"):
        return False
    plain = plain_text(lines[-1][len("####") :]).strip()
    numbers = find_numbers(plain)
    if len(numbers) != 1 or numbers[0].value is None or numbers[0].listed:
        return False
    return numbers[0].start == 0 and plain[numbers[0].end :].strip() in ("", "%")


def _is_operand(plain: str, number: NumberFound) -> bool:
    """Whether an operator joins a number to a term; in ``5/hour`` it joins a unit."""
    before, after = plain[: number.start].rstrip()[-1:], plain[number.end :].lstrip()
    if before and before in _OPERATORS:
        return True
    return (after[:1] == "/" and not after[1:].lstrip()[:1].isalpha()) or (after[:1] or " ") in _OPERATORS.replace(
        "/", ""
    )
