r"""Reads the numbers of a text: ``2 1/2``, ``1,000``, ``$3.50``, ``\frac{1}{2}``, ``3 \times 10^5``, ``½``.

Guarantees: a number is read whole or not at all, so ``2 1/2`` is never 1/2, ``10^5`` never 5 and ``2\sqrt{3}`` never 3;
what is written like a number and has no exact value here (``1/0``, ``2:1``, ``1.2.3``, ``10^9999``) is found with the
value ``None``. Values are fractions; nothing is rounded. The work grows linearly with the text: each pattern starts
at the beginning of a run, and no run is scanned twice.

How an ambiguous separator is read:

==============  ========  =======================================================================================
written         value     rule
==============  ========  =======================================================================================
``1,234``       1234      a comma before groups of three separates thousands; so do space, ``'`` and ``_``
``1.234``       1.234     a single point is a decimal point, whatever follows
``1.234.567``   1234567   several points before groups of three separate thousands
``1.234,5``     1234.5    of two kinds of separators the last one is the decimal one
``3,5 0,125``   3.5 .125  one comma that cannot separate thousands is a decimal comma
``1,2,3``       3         other commas separate the numbers of a list
``2 1/2``       5/2       a whole number before a proper fraction; ``5 7/2`` are two numbers
``50%``         50        a percent sign is a unit, as in GSM8K's references
``2 million``   2000000   words from hundred to trillion are factors; ``2k`` is 2 with a unit
==============  ========  =======================================================================================
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from agentrl.rewards.plain_text import OPAQUE

_MAX_CHARS = 100  # longer ones are no real answers, and Python refuses to convert more than 4,300 digits
_MAX_DIGITS = 4000  # of a power
_RUN = r"(?:[1-9]\d{0,2}(?:[ ]\d{3}){1,10}(?:[.,]\d{1,100})?(?![\d/]|[.,' ]\d|[ ]/)|\d++(?:[.,'_]\d++)*+|(?<!\.)\.\d++)"
_NUMBER = re.compile(
    rf"""(?<![A-Za-z0-9])(?<!\d[.:])(?<![A-Za-z0-9][_^])(?<![)\]{OPAQUE}]\^)(?<!\^[-+(])
    (?P<sign>(?<![\w)])[-+]|(?<==[ ])[-+][ ])?
    (?:
      (?P<whole>\d{{1,100}})[ ](?:and[ ])?(?P<over>\d{{1,100}})[ ]?/[ ]?(?P<under>\d{{1,100}})(?![\d/]|[.,]\d)
      |
      (?P<run>{_RUN})(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w))?
      (?:[ ]?/[ ]?(?P<below>{_RUN}) | (?:[ ]?[*x][ ]?(?P<ten>10))?\^\(?(?P<power>[-+]?\d{{1,3}})(?!\d)\)?)?
    )
    (?:[ ](?P<scale>hundred|thousand|million|billion|trillion)\b)?""",
    re.ASCII | re.VERBOSE | re.IGNORECASE,
)
_JOINED_BEFORE = re.compile(rf"{OPAQUE}[ ]?[-+*/^]?[ ]?\Z")
_JOINED_AFTER = re.compile(rf"[ ]?[-+*/^]?[ ]?{OPAQUE}|[ ]?\)?[ ]?\^|:\d|e[-+]?\d|[ ]?/[ ]?\d", re.IGNORECASE)
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:([ ,'_])\d{3})(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?")
_POINT_GROUPED = re.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?:,\d+)?|(?:[ .']\d{3})+,\d+)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


@dataclass(frozen=True)
class NumberFound:
    """A number of a text.

    Attributes:
        value: The exact value; ``None`` if it has none that can be read.
        start: Position of the first character, the sign, in the plain text.
        end: Position after the last character.
        listed: Whether it is the last one of several that stand together, such as ``1,2,3``, ``(1,2)`` or ``5 7/2``.
        decimal_comma: Whether it is one like ``3,5``, which mathematics also reads as a list.
    """

    value: Fraction | None
    start: int
    end: int
    listed: bool = False
    decimal_comma: bool = False


def find_numbers(plain: str) -> list[NumberFound]:
    """Returns the numbers of a text that went through :func:`agentrl.rewards.plain_text.plain_text`, in order."""
    return [_found(match) for match in _NUMBER.finditer(plain)]


def _found(match: re.Match[str]) -> NumberFound:
    text, (start, end) = match.string, match.span()
    joined = _JOINED_BEFORE.search(text[max(0, start - 4) : start]) or _JOINED_AFTER.match(text[end : end + 4])
    ratio = text[max(0, start - 1) : start] == ":" and text[max(0, start - 2) : start - 1].isdigit()
    run = match["run"] or ""
    comma = re.fullmatch(r"\d+,\d+", run) is not None and not _GROUPED.fullmatch(run)
    pair = comma and text[max(0, start - 1) : start] in ("(", "[") and text[end : end + 1] in (")", "]")
    listed = pair or (run.count(",") > 1 and not match["below"] and _separated(run) is None)
    if joined or ratio or end - start > _MAX_CHARS:
        return NumberFound(None, start, end)
    value = _magnitude(match, run.rpartition(",")[2] if listed else run)
    if value is not None:
        value *= 10 ** _SCALES.get((match["scale"] or "").lower(), 0)
        value = -value if "-" in (match["sign"] or "") else value
    return NumberFound(value, start, end, listed or _improper(match), comma)


def _improper(match: re.Match[str]) -> bool:
    """Whether a whole number stands before an improper fraction, which is a number of its own."""
    return match["whole"] is not None and int(match["over"]) >= int(match["under"])


def _magnitude(match: re.Match[str], run: str) -> Fraction | None:
    """Returns the absolute value of a number; ``None`` if it has none."""
    if match["whole"]:
        over, under = int(match["over"]), int(match["under"])
        whole = 0 if _improper(match) else int(match["whole"])
        return whole + Fraction(over, under) if under else None
    value = _decimal(run)
    if value is None:
        return None
    value *= Fraction(10) ** int(match["exponent"] or 0)
    if match["below"]:
        below = _decimal(match["below"])
        return value / below if below else None
    if match["power"]:
        factor, base = (value, Fraction(10)) if match["ten"] else (Fraction(1), value)
        return _power(factor, base, int(match["power"]))
    return value


def _power(factor: Fraction, base: Fraction, exponent: int) -> Fraction | None:
    digits = len(str(base.numerator)) + len(str(base.denominator))
    if digits * abs(exponent) > _MAX_DIGITS or (base == 0 and exponent <= 0):
        return None
    return factor * base**exponent


def _decimal(run: str) -> Fraction | None:
    """Returns the value of digits with separators; ``None`` if the separators make no number."""
    separated = _separated(run)
    return None if separated is None else Fraction(separated)


def _separated(run: str) -> str | None:
    """Returns digits with a decimal point at most; ``None`` if the separators make no number."""
    if _GROUPED.fullmatch(run):
        return re.sub(r"[ ,'_]", "", run)
    if _POINT_GROUPED.fullmatch(run):
        return re.sub(r"[ .']", "", run).replace(",", ".")
    decimal = run.replace(",", ".")  # at most one is left: a decimal point or comma
    return decimal if re.fullmatch(r"\d+(?:\.\d+)?|\.\d+", decimal) else None
