r"""Writes the numbers of an answer so that ``math-verify`` reads them as :mod:`agentrl.rewards.numeric` does.

Guarantees: only the form of a number changes (``2 1/2`` to ``5/2``, ``1 000`` to ``1000``); other
mathematics stays as it is. Where the reference is a number, the number after the last ``####`` or in the last box is
the answer. A comma as in ``3,5`` stays: in mathematics it is a list.
"""

import re
from fractions import Fraction

from agentrl.rewards.number_text import NumberFound, find_numbers
from agentrl.rewards.numeric import last_boxed, marked_number
from agentrl.rewards.plain_text import OPAQUE, ascii_numbers, plain_text

_TEX = re.compile(r"\\(?![$%,!])|(?<!\\)\$(?! ?-?[\d.])|[{}]")  # before a digit, a dollar sign is a currency
_BEFORE = re.compile(r"[A-Za-z ,.:]*")
_AFTER = re.compile(r"\s*%?\s*\.?(?:\s+[A-Za-z]{3}[A-Za-z ,.]*)?")  # math-verify knows the shorter units
_SET_APART = re.compile(r"_|[^\x00-\x7f]")


def plain_number(reference: str) -> str | None:
    """Returns the number that a reference consists of, as plain as can be; ``None`` if it says anything else."""
    boxed = last_boxed(reference)
    return _whole(reference if boxed is None else boxed)


def with_plain_numbers(answer: str) -> str:
    """Returns an answer with numbers that math-verify reads as they are meant, for a reference that is a number."""
    plain = plain_text(answer)
    marked = marked_number(plain)
    if marked is not None and marked.value is not None:
        percent = r"\%" if plain[marked.end :].lstrip()[:1] == "%" else ""
        return rf"\boxed{{{_written(marked.value)}{percent}}}"
    boxed = last_boxed(answer)
    if boxed is not None:
        whole = _whole(boxed)
        return rf"\boxed{{{_rewritten(boxed) if whole is None else whole}}}"
    return _rewritten(answer)


def _whole(text: str) -> str | None:
    """Returns the number that a text consists of, as plain as can be; ``None`` if there is more than one number."""
    plain = plain_text(text).strip(" $\n")
    plain = plain[:1] + plain[1:].lstrip() if plain[:1] in ("-", "+") else plain
    numbers = find_numbers(plain)
    if len(numbers) != 1 or not _rewritable(numbers[0]):
        return None
    (number,) = numbers
    after = plain[number.end :]
    if not _BEFORE.fullmatch(plain[: number.start]) or not _AFTER.fullmatch(after) or number.value is None:
        return None
    return _written(number.value) + (r"\%" if "%" in after else "")


def _rewritten(text: str) -> str:
    """Rewrites the numbers of a text without TeX, each in its place; TeX stays as it is."""
    if _TEX.search(text.replace("{,}", ",")):
        return ascii_numbers(text)
    plain = plain_text(text)
    if OPAQUE in plain:
        return ascii_numbers(text)
    parts, end = [], 0
    for number in find_numbers(plain):
        before = plain[end : number.start]
        span = plain[number.start : number.end]
        apart = " " if _SET_APART.match(before[-1:]) else ""
        new = span if number.value is None or not _rewritable(number) else _written(number.value, "/" in span)
        parts += [before, apart, new]
        end = number.end
    return "".join([*parts, plain[end:]])


def _rewritable(number: NumberFound) -> bool:
    return number.value is not None and not number.listed and not number.decimal_comma


def _written(value: Fraction, as_fraction: bool = False) -> str:
    """Returns an integer, a decimal, or else a fraction with a slash."""
    places = 0 if as_fraction else _decimal_places(value.denominator)
    if value.denominator == 1 or not places:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _decimal_places(denominator: int) -> int:
    """Returns the number of decimal places of a fraction; 0 if they do not end."""
    places = [0, 0]
    for index, factor in enumerate((2, 5)):
        while denominator % factor == 0:
            denominator //= factor
            places[index] += 1
    return max(places) if denominator == 1 else 0
