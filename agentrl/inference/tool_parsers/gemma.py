"""Finds calls of Gemma 4: ``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``, any number of them.

A text stands between two ``<|"|>``, as it is; numbers, ``true``, ``false``, ``null``, lists and objects are written as
in JSON. Keys have no quotes; in objects within objects they may have ``<|"|>``. Some of the family's templates print
``None`` for ``null``.

Guarantees: a mark inside of a text ends no call; a text that is not closed, or stands without its ``<|"|>``, makes the
call malformed. A malformed call reaches to the next mark of a call, or to the end of the text.
"""

import re
from collections.abc import Iterator
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools
from agentrl.inference.tool_parsers.values import (
    MAX_DEPTH,
    NAME,
    Malformed,
    malformed,
    mapping,
    object_text,
    read_json,
    shown,
    whose,
)

_OPENING = "<|tool_call>"
_HEAD = re.compile(r"\s*+call:\s*+(?P<name>[^{<]*+)(?=\{)")
_CLOSING = re.compile(r"\s*+<tool_call\|>(?:\s*+<\|tool_response>)?+")
_EDGE = re.compile(r"(?P<closing><tool_call\|>(?:\s*+<\|tool_response>)?+)|<\|tool_call>")
_QUOTE = '<|"|>'
_TEXT = re.compile(r'<\|"\|>(?P<text>[^<]*+(?:<(?!\|"\|>)[^<]*+)*+)<\|"\|>')
_KEY = re.compile(r"\s*+(?P<key>[^:{}\[\],<]*+)\s*+(?=:)")
_BARE = re.compile(r"[^,{}\[\]<]*+")
_SPACE = re.compile(r"\s*+")
_PYTHON = {"True": True, "False": False, "None": None}  # templates print these values in Python's spelling
_LAYOUT = f"<|tool_call>call:NAME{{KEY:{_QUOTE}TEXT{_QUOTE},KEY:NUMBER}}<tool_call|>"


def find_gemma(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    start = text.find(_OPENING)
    while start >= 0:
        call, end = _read(text, start)
        yield Found(start, end, (call,))
        start = text.find(_OPENING, end)


def _read(text: str, start: int) -> tuple[ParsedCall, int]:
    """Reads the call that begins at ``start``; returns it and its end."""
    body = start + len(_OPENING)
    head = _HEAD.match(text, body)
    name = head["name"].strip() if head else ""
    reader = _Reader(text, head.end() if head else body)
    try:
        if head is None or not NAME.fullmatch(name):
            name = ""
            raise Malformed(f"the tool call has no name; write {_LAYOUT}")
        arguments = object_text(reader.value(whose(name)), whose(name))
        return ParsedCall(name, arguments), reader.close()
    except Malformed as error:
        edge = _EDGE.search(text, reader.position)
        stop = edge.start() if edge else len(text)
        end = edge.end() if edge and edge["closing"] else stop
        return malformed(name, text[body:stop], error), end


class _Reader:
    """Reads one value, from ``position`` on."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self._depth = 0

    def close(self) -> int:
        """Returns the end of the call."""
        closing = _CLOSING.match(self.text, self.position)
        if closing is None:
            raise Malformed(f"the tool call is not closed or holds other text; write {_LAYOUT}")
        return closing.end()

    def value(self, what: str) -> Any:
        self._skip_space()
        if self.text.startswith(_QUOTE, self.position):
            return self._quoted(what)
        if not self.text.startswith(("{", "["), self.position):
            return self._bare(what)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Malformed(f"{what}: nested more than {MAX_DEPTH} levels deep")
        is_object = self.text[self.position] == "{"
        self.position += 1
        found = self._object(what) if is_object else self._list(what)
        self._depth -= 1
        return found

    def _object(self, what: str) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        while not self._takes("}"):
            if pairs and not self._takes(","):
                raise Malformed(f"{what}: want , or }} after a value; write {_LAYOUT}")
            pairs.append((self._key(what), self.value(what)))
        return mapping(pairs, what)

    def _list(self, what: str) -> list[Any]:
        items: list[Any] = []
        while not self._takes("]"):
            if items and not self._takes(","):
                raise Malformed(f"{what}: want , or ] after a value; write {_LAYOUT}")
            items.append(self.value(what))
        return items

    def _key(self, what: str) -> str:
        self._skip_space()
        if self.text.startswith(_QUOTE, self.position):
            key = self._quoted(what)
        else:
            found = _KEY.match(self.text, self.position)
            if found is None:
                raise Malformed(f"{what}: an argument has no name; write {_LAYOUT}")
            key, self.position = found["key"].strip(), found.end()
        if not self._takes(":"):
            raise Malformed(f"{what}: want : after {shown(key)}; write {_LAYOUT}")
        return key

    def _quoted(self, what: str) -> str:
        found = _TEXT.match(self.text, self.position)
        if found is None:
            raise Malformed(f"{what}: a text is not closed; write {_QUOTE} before and after it")
        self.position = found.end()
        return found["text"]

    def _bare(self, what: str) -> Any:
        found = _BARE.match(self.text, self.position)
        word = found[0].strip() if found else ""
        value = _PYTHON[word] if word in _PYTHON else self._json(word, what)
        self.position = found.end() if found else self.position
        return value

    def _json(self, word: str, what: str) -> Any:
        try:
            value = read_json(word, what)
        except Malformed:
            raise Malformed(
                f"{what}: want a value, got {shown(word)}; write {_QUOTE} before and after a text"
            ) from None
        if isinstance(value, str):
            raise Malformed(f"{what}: want {_QUOTE} before and after a text, got {shown(word)}")
        return value

    def _takes(self, mark: str) -> bool:
        """Steps over a mark, and white space before it, if it comes next."""
        self._skip_space()
        found = self.text.startswith(mark, self.position)
        self.position += len(mark) if found else 0
        return found

    def _skip_space(self) -> None:
        space = _SPACE.match(self.text, self.position)
        self.position = space.end() if space else self.position
