"""Reads arguments as strict JSON; the error for malformed ones is one line that tells the model what to change.

Guarantees: accepted arguments are the text of one JSON object, in Unicode, without NaN, Infinity and lone surrogates,
nested at most ``MAX_DEPTH`` deep, so that no later reader fails on them; duplicate keys are refused. The end of a value
is found in one pass, without backtracking.
"""

import json
import re
from typing import Any

from agentrl.core.strict_json import strict_json, unique
from agentrl.inference.tool_parsers.answer import ParsedCall

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_DEPTH = 100  # deeper than real arguments, and within the recursion limits of Python's parsers
NAME = re.compile(r"[^\s\"'`()\[\]{}<>,=\ud800-\udfff]++")  # names that are written without quotes
# The pieces of JSON text; other text and strings that are not closed do not match.
_PIECE = re.compile(
    r'[\s,:\d.eE+-]++|(?P<open>[\[{])|(?P<close>[\]}])|"(?:[^"\\]++|\\.)*+"|true|false|null|NaN|Infinity', re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_KEY = re.compile(r"""["']name["']\s*+:\s*+(?:"([^"\\\ud800-\udfff]*+)"|'([^'\\\ud800-\udfff]*+)')""")


class Malformed(ValueError):
    """A call cannot be read; the message is one line for the model."""


def shown(text: str) -> str:
    """Returns a text of the model quoted in one line and shortened, for messages."""
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."


def whose(name: str) -> str:
    """Name of a tool's arguments in error messages."""
    return f"the arguments of {shown(name)}" if name else "the arguments"


def json_end(text: str, start: int, pieces: re.Pattern[str] = _PIECE) -> tuple[int, bool]:
    """Finds the end of the JSON object or list that begins at ``start``; ``pieces`` may be another language's tokens.

    Brackets are counted, not matched by kind; :func:`read_json` checks whether the text is JSON.

    Returns:
        The position after the value and True; if it does not end, the position of the first text that is not JSON and
        False.
    """
    depth, position = 0, start
    while piece := pieces.match(text, position):
        position = piece.end()
        if piece.lastgroup == "open":
            depth += 1
        elif piece.lastgroup == "close":
            depth -= 1
            if depth <= 0:
                return position, True
    return position, False


def items_in(text: str, pieces: re.Pattern[str] = _PIECE) -> list[str]:
    """Returns the texts of a list's items.

    Args:
        text: Text of the list, beginning with its bracket.
        pieces: Pattern of the language's tokens; groups ``open`` and ``close`` are brackets.
    """
    items: list[str] = []
    depth, start = 0, 1
    for piece in pieces.finditer(text):
        depth += (piece.lastgroup == "open") - (piece.lastgroup == "close")
        ends = [piece.start()] if depth == 0 else []
        if depth == 1 and not piece[0].startswith(("'", '"')):
            ends = [piece.start() + at for at, letter in enumerate(piece[0]) if letter == ","]
        for end in ends:
            items.append(text[start:end].strip())
            start = end + 1
    return items


def calls_from(value: Any, raw: str) -> tuple[ParsedCall, ...]:
    """Returns the calls of a JSON object, or of a list of them; ``raw`` is the text it was read from."""
    if isinstance(value, list) and value:
        return tuple(call_from(item, part) for item, part in zip(value, items_in(raw.strip()), strict=True))
    return (call_from(value, raw),)


def read_json(text: str, what: str) -> Any:
    """Parses a text that is one JSON value.

    Args:
        text: Text of the value, without other text around it.
        what: Subject of the error, e.g. ``the arguments of 'add'``.

    Raises:
        Malformed: ``text`` is not exactly one JSON value.
    """
    if not text.strip():
        raise Malformed(f"{what}: want JSON, got nothing")
    try:
        return strict_json(text)
    except json.JSONDecodeError as error:
        hint = "; write a line break in a string as \\n" if error.msg.startswith("Invalid control") else ""
        raise Malformed(f"{what}: not valid JSON: {error.msg} at character {error.pos + 1}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what}: not valid JSON: {_reason(error)}") from None


def mapping(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Makes a dict of the keys and values of a JSON object.

    Args:
        pairs: Pairs of key and value, in the order in which they were written.
        what: Subject of the error.

    Raises:
        Malformed: A key occurs twice.
    """
    try:
        return unique(pairs)
    except ValueError as error:
        raise Malformed(f"{what}: {error}") from None


def object_text(value: Any, what: str) -> str:
    """Returns a JSON object as text.

    Args:
        value: JSON object, or the text of one.
        what: Subject of the error.

    Raises:
        Malformed: ``value`` is neither a JSON object nor the text of one.
    """
    if isinstance(value, str):
        value = read_json(value, what)
    if not isinstance(value, dict):
        raise Malformed(f"{what}: want a JSON object, got {kind(value)}")
    if _is_deeper(value, MAX_DEPTH):
        raise Malformed(f"{what}: nested more than {MAX_DEPTH} levels deep")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what}: not valid JSON: {_reason(error)}") from None
    if not _is_unicode(text):
        raise Malformed(f"{what}: half of a surrogate pair is not a character")
    return text


def kind(value: Any) -> str:
    """Name of a value's JSON type."""
    if value is None:
        return "null"
    for types, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, types):
            return name
    return "object"


def call_with(name: str, arguments: str) -> ParsedCall:
    """Makes a call from a name and the text of its arguments."""
    try:
        if not name:
            raise Malformed("the tool call has no name")
        return ParsedCall(name, object_text(read_json(arguments, whose(name)), whose(name)))
    except Malformed as error:
        return malformed(name, arguments, error)


def call_from(value: Any, raw: str) -> ParsedCall:
    """Makes a call from a JSON object with its name and arguments; ``raw`` is the text it was read from."""
    name = ""
    try:
        if not isinstance(value, dict):
            raise Malformed(f"a tool call must be a JSON object with name and arguments, got {kind(value)}")
        name, holder = parts_of(value)
        if not name:
            raise Malformed("the tool call has no name")
        keys = [key for key in ARGUMENT_KEYS if key in holder]
        if not keys:
            raise Malformed(f"the call of {shown(name)} has no arguments; if it needs none, write {{}}")
        return ParsedCall(name, object_text(holder[keys[0]], whose(name)))
    except Malformed as error:
        return malformed(name, raw, error)


def parts_of(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name of the tool that an object calls, empty if there is none, and the object with the arguments.

    ``function`` may replace ``name`` (Llama does that), or hold both name and arguments (OpenAI's format).
    """
    inner = value.get("function")
    if isinstance(inner, dict) and "name" not in value:
        value = inner
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name.strip() or not _is_unicode(name):
        name = ""
    return name, value


def malformed(name: str, raw: str, error: Malformed) -> ParsedCall:
    """Makes a malformed call, with the text that the model wrote."""
    return ParsedCall(name, raw.strip(), str(error))


def name_in(raw: str, known: frozenset[str]) -> str:
    """Finds the tool's name in the text of a malformed JSON call: a known tool's, or else the first name."""
    names = [match[1] or match[2] or "" for match in _NAME_KEY.finditer(raw)]
    return next((name for name in names if name in known), names[0] if names else "")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    text = str(error).splitlines()[0]
    return "an integer with too many digits" if text.startswith("Exceeds the limit") else text


def _is_unicode(text: str) -> bool:
    return not _SURROGATE.search(text)


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [part for item in nested for part in (item.values() if isinstance(item, dict) else item)]
        if not nested:
            return False
    return True
