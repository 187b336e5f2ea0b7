"""Test code taken apart, so that what is expected never goes where the solution runs.

Guarantees: an assertion that compares an expression with a literal becomes a :class:`Call`, whose expression is
evaluated in the sandbox and whose value is compared out here; no code of a test or a solution runs out here. A value
that is not what :func:`decode` knows equals nothing.
"""

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal

_CONSTANTS = {"math", "np", "numpy", "cmath", "statistics"}  # a call on these may hold what is expected
_TELLING = (ast.Compare, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


class NotPlainError(ValueError):
    """The returned value is not plain data."""


@dataclass(frozen=True)
class Call:
    """One assertion.

    Attributes:
        source: The expression that the sandbox evaluates.
        expected: Expected value.
        how: ``==`` and ``is`` as in Python; ``truth`` compares ``bool(value)``.
    """

    source: str
    expected: Any
    how: Literal["==", "is", "truth"] = "=="

    def holds(self, reply: Any) -> bool:
        """Whether the harness's reply for this call is what was expected."""
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
    """The calls of a test, ``None`` where one of its statements is no comparison of an expression with a literal.

    Raises:
        ValueError: It is no Python.
    """
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {test[:200]!r} is no Python: {error}") from error
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
    """Whether an expression compares nothing itself, and so says nothing of what is expected."""
    return not any(isinstance(part, _TELLING) for part in ast.walk(node))


def _own(node: ast.expr) -> bool:
    """Whether a call is one of a name that only the solution can define."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and not hasattr(builtins, node.id) and node.id not in _CONSTANTS


def decode(data: Any) -> Any:
    """The value that the harness's ``encode`` made into JSON.

    Raises:
        NotPlainError: It made no such JSON.
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
