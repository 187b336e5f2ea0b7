"""Finds lists of Python calls: ``[f(a=1), g(b="x")]`` (Llama 3.2 and 4 with vLLM's templates, LFM2).

LFM2 puts the list between ``<|tool_call_start|>`` and ``<|tool_call_end|>``, Llama 4 sometimes between
``<|python_start|>`` and ``<|python_end|>``. The templates of LFM2.5 write a string as it is between quotes, so a line
break in a string is read as one.

Guarantees: nothing is evaluated; values are literals of JSON's types, and ``true``, ``false`` and ``null`` are
accepted. A list without tags is a call if its first name is a known tool, or if it is valid and no text stands before
it; other lists are content.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_names
from agentrl.inference.tool_parsers.values import (
    MAX_DEPTH,
    Malformed,
    items_in,
    json_end,
    malformed,
    mapping,
    object_text,
    read_json,
    whose,
)

_START = re.compile(r"(?P<mark><\|(?:tool_call|python)_(?:start|end)\|>)|\[\s*+(?P<name>[^\W\d][\w.]*+)\s*+\(")
_OPENING_MARKS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_PIECE = re.compile(
    r"""'''(?:[^'\\]++|\\.|'(?!''))*+(?:'''|\Z)|\"""(?:[^"\\]++|\\.|"(?!""))*+(?:\"""|\Z)"""
    r"""|'(?:[^'\\\n]++|\\.)*+'?|"(?:[^"\\\n]++|\\.)*+"?|(?P<open>[(\[{])|(?P<close>[)\]}])|[^'"()\[\]{}]++""",
    re.DOTALL,
)
_PIECE_OF_LINES = re.compile(_PIECE.pattern.replace(r"\\\n]", r"\\]"), re.DOTALL)  # a string may have several lines
_LAYOUT = "a tool call is written NAME(KEY=VALUE)"
_NAMES = {"true": True, "false": False, "null": None}
_STRING = re.compile(r"""'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+\"""", re.DOTALL)
_BREAK = re.compile(r"\\.|(\n)", re.DOTALL)
_FIRST_NAME = re.compile(r"\s*+\[?\s*+([^\W\d][\w.]*+)\s*+\(")


def find_pythonic(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    known = tool_names(tools)
    position = 0
    is_alone = True  # no text has been found so far
    while start := _START.search(text, position):
        is_alone = is_alone and not text[position : start.start()].strip()
        position = start.end()
        if start["mark"] in _OPENING_MARKS:
            part = _tagged(text, start)
        elif start["mark"]:
            part = Found(start.start(), start.end())
        else:
            part = _bare(text, start, known) if is_alone or start["name"] in known else None
        if part is not None:
            yield part
            position = part.end
        else:
            is_alone = False


def _tagged(text: str, mark: re.Match[str]) -> Found:
    """Parses a list of calls between a pair of marks; between Llama 4's marks there may be plain text instead."""
    if mark["mark"] == "<|python_start|>" and _FIRST_NAME.match(text, mark.end()) is None:
        return Found(mark.start(), mark.end())
    closing = _OPENING_MARKS[mark["mark"]]
    end = text.find(closing, mark.end())
    body = text[mark.end() : end if end >= 0 else len(text)]
    return Found(mark.start(), end + len(closing) if end >= 0 else len(text), _read(body))


def _bare(text: str, start: re.Match[str], known: frozenset[str]) -> Found | None:
    end = json_end(text, start.start(), _PIECE)[0]
    calls = _read(text[start.start() : end])
    if start["name"] not in known and any(call.error is not None for call in calls):
        return None
    return Found(start.start(), end, calls)


def _read(source: str) -> tuple[ParsedCall, ...]:
    """Reads the calls of a list; if it cannot be read, returns one malformed call with all of its text."""
    source = source.strip()
    try:
        elements, pieces = _elements_and_pieces(source)
    except Malformed as error:
        name = _FIRST_NAME.match(source)
        return (malformed(name[1] if name else "", source, error),)
    if not source.startswith("["):
        return (_call(elements[0], source),)
    parts = [part for part in items_in(source, pieces) if part]
    if len(parts) != len(elements):  # an element with a comma in it, such as a lambda
        return (malformed("", source, Malformed(_LAYOUT)),)
    return tuple(_call(element, part) for element, part in zip(elements, parts, strict=True))


def json_or_literal(text: str, what: str) -> Any:
    """Reads a JSON value, or a list or an object that is written as in Python.

    Args:
        text: Text of the value.
        what: Subject of the error.

    Raises:
        Malformed: ``text`` is neither.
    """
    try:
        return read_json(text, what)
    except Malformed as error:
        try:
            tree = _tree(text.strip())
        except Malformed:
            raise error from None
        if not isinstance(tree, ast.List | ast.Dict):
            raise
        return _value(tree, what)


def _tree(source: str) -> ast.expr:
    if _depth(source) > MAX_DEPTH:
        raise Malformed(f"the tool calls: nested more than {MAX_DEPTH} levels deep")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences of the model need no warning
            return ast.parse(source, mode="eval").body
    except SyntaxError as error:
        where = f" in line {error.lineno} at character {error.offset}" if error.lineno and error.offset else ""
        raise Malformed(f"the tool calls are not valid Python: {error.msg}{where}") from None
    except (ValueError, RecursionError, MemoryError):
        raise Malformed("the tool calls are not valid Python") from None


def _elements_and_pieces(source: str) -> tuple[list[ast.expr], re.Pattern[str]]:
    """Returns the elements of a list, and the pieces of its text: a line break in a string is read as one."""
    try:
        return _elements(source), _PIECE
    except Malformed:
        escaped = _STRING.sub(lambda string: _BREAK.sub(lambda at: "\\n" if at[1] else at[0], string[0]), source)
        if escaped == source:
            raise
        try:
            return _elements(escaped), _PIECE_OF_LINES
        except Malformed:
            pass
        raise


def _elements(source: str) -> list[ast.expr]:
    tree = _tree(source)
    elements = tree.elts if isinstance(tree, ast.List) else [tree]
    if not elements:
        raise Malformed("the list of tool calls is empty")
    return elements


def _depth(source: str) -> int:
    depth = deepest = 0
    for piece in _PIECE.finditer(source):
        depth += (piece.lastgroup == "open") - (piece.lastgroup == "close")
        deepest = max(deepest, depth)
    return deepest


def _call(element: ast.expr, source: str) -> ParsedCall:
    name = ""
    try:
        if not isinstance(element, ast.Call):
            raise Malformed(_LAYOUT)
        name = _name(element.func)
        keys = [keyword.arg for keyword in element.keywords if keyword.arg is not None]
        if element.args or len(keys) < len(element.keywords):
            raise Malformed(f"{whose(name)}: each argument needs its name, as in KEY=VALUE")
        values = [_value(keyword.value, whose(name)) for keyword in element.keywords]
        pairs = list(zip(keys, values, strict=True))
        return ParsedCall(name, object_text(mapping(pairs, whose(name)), whose(name)))
    except Malformed as error:
        return malformed(name, source, error)


def _name(function: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise Malformed(_LAYOUT)
    return ".".join([function.id, *reversed(parts)])


def _value(node: ast.expr, what: str) -> Any:
    """The value of a literal."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element, what) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return mapping([(_key(k, what), _value(v, what)) for k, v in zip(keys, values, strict=True)], what)
    raise Malformed(f"{what}: want a plain value, not an expression")


def _key(node: ast.expr | None, what: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed(f"{what}: a key of a dict must be a string")
