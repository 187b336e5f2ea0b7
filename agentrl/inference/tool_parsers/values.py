"""Arguments as JSON: read strictly, refused in one line that a model can act on.

Guarantees: what comes out as arguments is the text of one JSON object, in Unicode, without NaN, Infinity and half
surrogate pairs, nested at most ``MAX_DEPTH`` deep, so that no later reader fails on it; a key that is written twice is
refused. The end of a value is found in one pass, without going back.
"""

import json
import re
from typing import Any

from agentrl.core.strict_json import strict_json, unique
from agentrl.inference.tool_parsers.answer import ParsedCall

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_DEPTH = 100  # nobody's arguments are deeper, and Python's own readers still stand it
NAME = re.compile(r"[^\s\"'`()\[\]{}<>,=\ud800-\udfff]++")  # names that stand without quotes
# Everything that may stand in JSON, in pieces; what is between does not match, and a string has to be closed.
_PIECE = re.compile(
    r'[\s,:\d.eE+-]++|(?P<open>[\[{])|(?P<close>[\]}])|"(?:[^"\\]++|\\.)*+"|true|false|null|NaN|Infinity', re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME_KEY = re.compile(r"""["']name["']\s*+:\s*+(?:"([^"\\\ud800-\udfff]*+)"|'([^'\\\ud800-\udfff]*+)')""")


class Malformed(ValueError):
    """A call that cannot be read; the text is one line for the model."""


def shown(text: str) -> str:
    """A text of the model, quoted in one line and not too long."""
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."


def whose(name: str) -> str:
    """Name of a tool's arguments in error messages."""
    return f"the arguments of {shown(name)}" if name else "the arguments"


def json_end(text: str, start: int, pieces: re.Pattern[str] = _PIECE) -> tuple[int, bool]:
    """The end of the JSON object or list that begins at ``start``; other ``pieces`` read other languages' brackets.

    Brackets are counted, not compared; whether it is JSON is up to :func:`read_json`.

    Returns:
        The position after it and True; where it does not end, the position of what cannot stand in JSON and False.
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
    """The texts of a list's items.

    Args:
        text: The list, from its first bracket on.
        pieces: Pieces that the text is made of; groups ``open`` and ``close`` are brackets.
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
    """The calls of a JSON object, or of a list of them; ``raw`` is the text it was read from."""
    if isinstance(value, list) and value:
        return tuple(call_from(item, part) for item, part in zip(value, items_in(raw.strip()), strict=True))
    return (call_from(value, raw),)


def read_json(text: str, what: str) -> Any:
    """Parses a text that is one JSON value.

    Args:
        text: The text, and nothing around it.
        what: Subject of the error, e.g. ``the arguments of 'add'``.

    Raises:
        Malformed: ``text`` is not exactly one JSON value.
    """
    if not text.strip():
        raise Malformed(f"{what}: want JSON, and there is nothing")
    try:
        return strict_json(text)
    except json.JSONDecodeError as error:
        hint = "; a line break in a string is written \\n" if error.msg.startswith("Invalid control") else ""
        raise Malformed(f"{what}: not valid JSON: {error.msg} at character {error.pos + 1}{hint}") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what}: not valid JSON: {_reason(error)}") from None


def mapping(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Keys and values, of arguments or of a value in them, as a dict.

    Args:
        pairs: In the order in which they were written.
        what: Subject of the error.

    Raises:
        Malformed: A key is written twice.
    """
    try:
        return unique(pairs)
    except ValueError as error:
        raise Malformed(f"{what}: {error}") from None


def object_text(value: Any, what: str) -> str:
    """A JSON object as text.

    Args:
        value: The object, or the text of one.
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
        raise Malformed(f"{what}: half of a surrogate pair is no character")
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
    """A call whose name and whose arguments' text stand apart."""
    try:
        if not name:
            raise Malformed("the tool call has no name")
        return ParsedCall(name, object_text(read_json(arguments, whose(name)), whose(name)))
    except Malformed as error:
        return malformed(name, arguments, error)


def call_from(value: Any, raw: str) -> ParsedCall:
    """A call from a JSON object that has its name and arguments; ``raw`` is the text it was read from."""
    name = ""
    try:
        if not isinstance(value, dict):
            raise Malformed(f"a tool call is a JSON object with name and arguments, got {kind(value)}")
        name, holder = parts_of(value)
        if not name:
            raise Malformed("the tool call has no name")
        keys = [key for key in ARGUMENT_KEYS if key in holder]
        if not keys:
            raise Malformed(f"the call of {shown(name)} has no arguments; where there are none, write {{}}")
        return ParsedCall(name, object_text(holder[keys[0]], whose(name)))
    except Malformed as error:
        return malformed(name, raw, error)


def parts_of(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name of the tool that an object calls, empty where there is none, and the object that has the arguments.

    ``function`` may stand for ``name`` (Llama does that) or around both (OpenAI's own shape).
    """
    inner = value.get("function")
    if isinstance(inner, dict) and "name" not in value:
        value = inner
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name.strip() or not _is_unicode(name):
        name = ""
    return name, value


def malformed(name: str, raw: str, error: Malformed) -> ParsedCall:
    """A call that could not be read, with the text that the model wrote."""
    return ParsedCall(name, raw.strip(), str(error))


def name_in(raw: str, known: frozenset[str]) -> str:
    """The tool's name in the text of a JSON call that cannot be read: a known one, or else the first."""
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
