"""Splits test code into expressions and expected values, so that expected values never enter the sandbox.

Guarantees: an assertion that compares an expression with a literal becomes a :class:`Call`: its expression is
evaluated in the sandbox, its value is compared outside; no code of a test or a solution runs outside. A value
that :func:`decode` does not know equals nothing.
"""

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal

_CONSTANTS = {"math", "np", "numpy", "cmath", "statistics"}  # a call on these may compute the expected value
_TELLING = (ast.Compare, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


class NotPlainError(ValueError):
    """The returned value is not plain data."""


@dataclass(frozen=True)
class Call:
    """An assertion, split into the expression to evaluate and the expected value.

    Attributes:
        source: The expression that the sandbox evaluates.
        expected: Expected value.
        how: Comparison: ``==`` or ``is`` as in Python; ``truth`` compares ``bool(value)``.
    """

    source: str
    expected: Any
    how: Literal["==", "is", "truth"] = "=="

    def holds(self, reply: Any) -> bool:
        """Whether the harness's reply for this call equals the expected value."""
        if not isinstance(reply, dict) or set(reply) != {"value"}:
            return False
        try:
            value = decode(reply["value"])
            if self.how == "is":
                return type(value) is type(self.expected) and value == self.expected
            return bool((bool(value) if self.how == "truth" else value) == self.expected)
        except (NotPlainError, RecursionError):
            return False


def calls_of(test: str) -> list[Call] | None:
    """Returns the calls of a test; ``None`` if a statement does not assert a comparison with a literal.

    Raises:
        ValueError: ``test`` is not valid Python.
    """
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {test[:200]!r} is not valid Python: {error}") from error
    calls = [_call(node.test) if isinstance(node, ast.Assert) else None for node in body]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _call(node: ast.expr) -> Call | None:
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    inner = node.operand if isinstance(node, ast.UnaryOp) and negated else node
    if isinstance(inner, ast.Call):
        return Call(ast.unparse(inner), not negated, "truth") if _own(inner) and _silent(inner) else None
    if negated or not isinstance(inner, ast.Compare) or len(inner.ops) != 1:
        return None
    sides = [inner.left, inner.comparators[0]]
    literals = [_literal(side) for side in sides]
    if sum(literal is not None for literal in literals) != 1:
        return None
    place = 0 if literals[0] is not None else 1
    expected, asked = literals[place], sides[1 - place]
    assert expected is not None
    if isinstance(inner.ops[0], ast.Is) and (expected[0] is None or isinstance(expected[0], bool)):
        how: Literal["==", "is"] = "is"
    elif isinstance(inner.ops[0], ast.Eq):
        how = "=="
    else:
        return None
    return Call(ast.unparse(asked), expected[0], how) if _silent(asked) else None


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def _silent(node: ast.expr) -> bool:
    """Whether an expression contains no comparison, and so does not reveal the expected value."""
    return not any(isinstance(part, _TELLING) for part in ast.walk(node))


def _own(node: ast.expr) -> bool:
    """Whether the called name can only be defined by the solution: it is no builtin and no known module."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and not hasattr(builtins, node.id) and node.id not in _CONSTANTS


def decode(data: Any) -> Any:
    """Decodes a value that the harness's ``encode`` turned into JSON data.

    Raises:
        NotPlainError: ``data`` is not an output of ``encode``, or the value is not plain data.
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlainError("not the harness's")
    ((kind, content),) = data.items()
    try:
        return _DECODERS[kind](content)
    except (KeyError, TypeError, ValueError, ArithmeticError, InvalidOperation) as error:
        raise NotPlainError(f"{kind}: {error}") from error


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(*map(decode, parts)),
    "bytes": bytes.fromhex,
    "fraction": lambda parts: Fraction(*map(decode, parts)),
    "decimal": Decimal,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
}
