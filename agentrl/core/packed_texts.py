"""Leaves out what a message's tokens say once more: its texts, which are the bytes of its ids.

Guarantees: a text is left out only where the ids say it letter by letter, and comes back the same. Nothing but the
packed part is needed for that: the bytes of its ids stand in it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Pieces = Callable[[int], bytes]
"""Bytes that a token id stands for."""

_SHORTEST = 12  # letters of a text that is left out: its place takes about as many bytes


class LeftOut:
    """Takes the texts out of the messages of nodes.

    Args:
        pieces: Bytes of an id; an exception means that it stands for none.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._known: dict[int, bytes | None] = {}
        self._used: set[int] = set()

    def take(self, node: dict[str, Any]) -> None:
        """Empties the texts of a node's message that its ids say.

        ``texts`` of the node becomes a list of ``[path, start, length]``: the keys that lead to a text in ``message``,
        and its place in the text of all ids, in letters.
        """
        if "texts" in node or not node["token_ids"] or not isinstance(node.get("message"), dict):
            return
        wanted = [one for one in _texts(node["message"], []) if len(one[2]) >= _SHORTEST]
        said = self._said(node["token_ids"]) if wanted else None
        if not said:
            return
        found = []
        for path, holder, text in wanted:
            start = said.find(text)
            if start >= 0:
                holder[path[-1]] = ""
                found.append([path, start, len(text)])
        if found:
            node["texts"] = found
            self._used.update(node["token_ids"])

    def _said(self, ids: list[int]) -> str | None:
        """Returns the text of ids; ``None`` if one of them stands for no bytes."""
        pieces = []
        for one in ids:
            if one not in self._known:
                self._known[one] = self._read(one)
            piece = self._known[one]
            if piece is None:
                return None
            pieces.append(piece)
        return _decoded(pieces)

    def _read(self, token: int) -> bytes | None:
        try:
            return self._pieces(token)
        except (LookupError, OverflowError, TypeError, ValueError):  # an id beyond the tokenizer's
            return None

    def table(self) -> bytes:
        """Returns the bytes of all ids that are needed, as JSON: id -> bytes, each a letter of Latin-1."""
        return json.dumps({one: (self._known[one] or b"").decode("latin-1") for one in sorted(self._used)}).encode()


class PutBack:
    """Gives messages the texts that were taken out.

    Args:
        table: JSON of :meth:`LeftOut.table`.
    """

    def __init__(self, table: bytes) -> None:
        self._pieces = {int(one): text.encode("latin-1") for one, text in json.loads(table).items()}

    def give(self, node: dict[str, Any]) -> None:
        """Fills in the texts of a node that has its ids again."""
        said = _decoded([self._pieces[one] for one in node["token_ids"]])
        for path, start, length in node.pop("texts"):
            holder = node["message"]
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = said[start : start + length]


def _decoded(pieces: list[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")


def _texts(value: Mapping[str, Any] | list[Any], path: list[str | int]) -> Iterator[tuple[list[str | int], Any, str]]:
    """Yields the texts within a message: the keys that lead to it, what holds it, and the text."""
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(one, str):
            yield [*path, key], value, one
        elif isinstance(one, (Mapping, list)):
            yield from _texts(one, [*path, key])
