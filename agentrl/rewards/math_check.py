r"""The part of :mod:`agentrl.rewards.math_answer` that runs in a worker process: ``math-verify`` without its alarms.

Guarantees: importing this imports sympy, so only a worker does; math-verify's own timeouts, which work in the main
thread only and count as a wrong answer, are off: the pool's end the process. What fails while two parsed expressions
are compared is told apart from a comparison that says no.
"""

import logging
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

MAX_ANSWER_CHARS = 20_000  # of its end, where the answer is; its regexes are slow on more
_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())  # a box goes before all else
_DELIMITED = re.compile(r"\$|\\boxed\b|\\\(|\\\[")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})(?!\w)")  # LaTeX reads 1e5 as 1*e*5


def check(answer: str, reference: str) -> tuple[float | None, str]:
    """Compare an answer with the reference.

    Returns:
        1.0 or 0.0 and an empty string; ``None`` and what failed where the verifier could not tell.

    Raises:
        ValueError: The reference is no mathematics.
    """
    gold = _parse(_delimited(reference))
    if not any(not isinstance(expression, str) for expression in gold):
        raise ValueError(f"the reference answer {reference!r} cannot be parsed as mathematics")
    try:
        said = _parse(answer[-MAX_ANSWER_CHARS:])
    except MemoryError as error:
        return None, f"parsing the answer: {error!r}"
    failures: list[str] = []
    for expected, found in product(gold, said):
        equal, error = _attempt(partial(verify, expected, found, timeout_seconds=None, raise_on_error=True))
        if equal:
            return 1.0, ""
        if error is not None:  # never taken for a no
            failures.append(f"comparing: {error!r}"[:500])
    return (None, failures[0]) if failures else (0.0, "")


def _parse(text: str) -> list[Any]:
    """Expressions in ``text``, empty where there are none.

    Raises:
        MemoryError: They need more than the worker may hold.
    """
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    limits: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
    found, error = _attempt(partial(parse, text, _TARGETS, **limits))
    if isinstance(error, MemoryError):
        raise error
    return found or []  # what cannot be parsed is no mathematics


def _attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Returns the result or the exception of a call: the boundary to sympy, which raises nearly anything."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def _delimited(reference: str) -> str:
    r"""The reference as math-verify reads it whole: bare, ``(0,1]`` would be the number 1 and ``x=3`` the number 3."""
    reference = reference.rpartition("####")[2].strip()
    return reference if _DELIMITED.search(reference) else rf"\boxed{{{reference}}}"
