r"""Runs ``math-verify`` in a worker process, for :mod:`agentrl.rewards.math_answer`.

Guarantees: only workers import this module, which imports sympy; math-verify's own timeouts, which work only in the
main thread and count as a wrong answer, are off: the worker pool has its own. An error while two parsed expressions
are compared is never reported as a wrong answer.
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from agentrl.rewards.math_numbers import plain_number, with_plain_numbers
from agentrl.rewards.plain_text import ascii_numbers

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

MAX_ANSWER_CHARS = 20_000  # only the end of a long text is parsed: math-verify's regexes are slow on more
_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())  # a box has the highest priority
_DELIMITED = re.compile(r"\$|\\boxed\b|\\\(|\\\[")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?!\w)")  # LaTeX reads 1e5 as 1*e*5


def check(answer: str, reference: str) -> tuple[float | None, str]:
    """Compare an answer with the reference.

    Returns:
        1.0 or 0.0 and an empty string; or ``None`` and the error if math-verify failed.

    Raises:
        ValueError: ``reference`` cannot be parsed as mathematics.
    """
    reference = reference.rpartition("####")[2].strip()
    number = plain_number(reference)
    gold = _parse(_delimited(ascii_numbers(reference) if number is None else number))
    if not any(not isinstance(expression, str) for expression in gold):
        raise ValueError(f"the reference answer {reference!r} cannot be parsed as mathematics")
    answer = answer[-MAX_ANSWER_CHARS:]
    try:
        said = _parse(ascii_numbers(answer) if number is None else with_plain_numbers(answer))
    except MemoryError as error:
        return None, f"parsing the answer: {error!r}"
    failures: list[str] = []
    for expected, found in product(gold, said):
        equal, error = _attempt(partial(verify, expected, found, timeout_seconds=None, raise_on_error=True))
        if equal:
            return 1.0, ""
        if error is not None:  # a failure is no wrong answer
            failures.append(f"comparing: {error!r}"[:500])
    return (None, failures[0]) if failures else (0.0, "")


def _parse(text: str) -> list[Any]:
    """Parses the expressions in ``text``; returns an empty list if there are none.

    Raises:
        MemoryError: Parsing needs more memory than the worker may use.
    """
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    limits: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
    found, error = _attempt(partial(parse, text, _TARGETS, **limits))
    if isinstance(error, MemoryError):
        raise error
    return found or []  # text that cannot be parsed has no mathematics


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Returns the result or the exception of a call; sympy can raise nearly any exception."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def _delimited(reference: str) -> str:
    r"""Boxes a reference, so that math-verify reads all of it: a bare ``(0,1]`` would be read as the number 1."""
    return reference if _DELIMITED.search(reference) else rf"\boxed{{{reference}}}"
