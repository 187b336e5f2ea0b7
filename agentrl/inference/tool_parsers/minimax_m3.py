"""Calls of MiniMax-M3: elements named after the arguments, which may nest; a mark stands before each tag.

The mark is ``]<]minimax[>[``. ``<tool_call>`` stands around all calls, ``<invoke name="...">`` around each, and in it
``<KEY>VALUE</KEY>`` for each argument. An object is an element with one element for each key, a list one with an
element ``<item>`` for each item; both are written without white space, and the template leaves out what is null.
(MiniMax-M2: ``minimax.py``, MiniMax-M1: ``json_blocks.py``.)

Guarantees: a tag without the mark is part of a value; a call whose tags do not nest, or that has text beside the
elements of a value, is malformed as a whole, and reaches to the next tag that ends or begins a call. A value is read by
its schema; without one, elements ``item`` are a list, and other elements an object.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.inference.tool_parsers.answer import Found, ParsedCall, Tools, tool_parameters
from agentrl.inference.tool_parsers.typed import schemas_of, typed, types_of
from agentrl.inference.tool_parsers.values import (
    MAX_DEPTH,
    NAME,
    Malformed,
    malformed,
    mapping,
    object_text,
    shown,
    whose,
)

_MARK = re.escape("]<]minimax[>[")
_ITEM = "item"
_CALL = re.compile(
    rf"""(?:{_MARK}<tool_call>\s*+)?{_MARK}<invoke\s++name="(?P<name>[^">]*+)"\s*+>"""
    rf"|{_MARK}<tool_call>|{_MARK}<invoke(?=[\s>])"
)
_TAG = re.compile(rf"{_MARK}<(?P<closing>/?)(?P<name>[^<>/][^<>]*+)>")
_OUTER = re.compile(r"invoke\s|tool_call\Z")  # tags that stand in no argument
_BLOCK_END = re.compile(rf"\s*+{_MARK}</tool_call>")
_EDGE = re.compile(
    rf"(?P<closing>{_MARK}</invoke>(?:\s*+{_MARK}</tool_call>)?+|{_MARK}</tool_call>)|{_MARK}<(?:invoke|tool_call)"
)
_LAYOUT = (
    ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>'
    "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>"
)


@dataclass
class _Element:
    """An element with its text, and the elements in it."""

    name: str
    text: str = ""
    inner: list["_Element"] = field(default_factory=list)


def find_minimax_m3(text: str, tools: Tools) -> Iterator[Found]:
    """Finds the calls in a text."""
    position = 0
    while opening := _CALL.search(text, position):
        name = (opening["name"] or "").strip()
        name = name if NAME.fullmatch(name) else ""
        try:
            if not name:
                raise Malformed(f"the tool call has no name; write {_LAYOUT}")
            elements, position = _elements(text, opening.end())
            arguments = _object(elements, tool_parameters(tools, name), whose(name))
            call = ParsedCall(name, object_text(arguments, whose(name)))
        except _Unclosed as error:
            position = _edge(text, opening.end())
            call = malformed(name, text[opening.start() : position], error)
        except Malformed as error:
            position = position if name and position > opening.end() else _edge(text, opening.end())
            call = malformed(name, text[opening.start() : position], error)
        yield Found(opening.start(), position, (call,))


class _Unclosed(Malformed):
    """The tags of a call do not nest up to its end."""


def _edge(text: str, position: int) -> int:
    edge = _EDGE.search(text, position)
    if edge is None:
        return len(text)
    return edge.end() if edge["closing"] else edge.start()


def _elements(text: str, position: int) -> tuple[list[_Element], int]:
    """Reads the elements of a call; returns them and the call's end.

    Raises:
        Malformed: The tags do not nest, or there is text beside elements.
    """
    stack = [_Element("invoke")]
    while tag := _TAG.search(text, position):
        between, position = text[position : tag.start()], tag.end()
        top = stack[-1]
        if between.strip() and (not tag["closing"] or top.inner or len(stack) == 1):
            where = whose("") if len(stack) == 1 else shown(top.name)
            raise _Unclosed(f"{where}: text beside elements ({shown(between.strip())}); write {_LAYOUT}")
        if not tag["closing"]:
            if len(stack) > MAX_DEPTH:
                raise _Unclosed(f"{shown(stack[1].name)}: nested more than {MAX_DEPTH} levels deep")
            if _OUTER.match(tag["name"]):
                raise _Unclosed(f"{shown(top.name)} is not closed; write {_LAYOUT}")
            stack.append(_Element(tag["name"]))
        elif tag["name"] != top.name:
            raise _Unclosed(f"{shown(top.name)} is not closed; write {_LAYOUT}")
        elif len(stack) == 1:
            end = _BLOCK_END.match(text, position)
            return top.inner, end.end() if end else position
        else:
            top.text = between
            stack.pop()
            stack[-1].inner.append(top)
    raise _Unclosed(f"the tool call is not closed; write {_LAYOUT}")


def _object(elements: list[_Element], schema: Mapping[str, Any], what: str) -> dict[str, Any]:
    return mapping([(one.name, _value(one, schema)) for one in elements], what)


def _value(element: _Element, schema: Mapping[str, Any]) -> Any:
    """Returns the value of an element.

    Args:
        element: The element.
        schema: JSON schema of the object that it is a property of.

    Raises:
        Malformed: It is no value of its types.
    """
    types = types_of(schema, element.name)
    if not element.inner:
        if not element.text.strip() and "string" not in types and types & {"object", "array"}:
            return {} if "object" in types else []  # the template writes an empty one so
        return typed(element.text, schema, element.name)
    is_list = all(one.name == _ITEM for one in element.inner) and (not types or "array" in types)
    if types and not types & ({"array"} if is_list else {"object"}):
        raise Malformed(f"parameter {shown(element.name)}: want {' or '.join(sorted(types))}, got elements")
    inner = schemas_of(schema, element.name)
    if is_list:
        items = next((part["items"] for part in inner if isinstance(part.get("items"), Mapping)), {})
        return [_value(one, {**schema, "properties": {_ITEM: items}}) for one in element.inner]
    found = next((part for part in inner if isinstance(part.get("properties"), Mapping)), {})
    return _object(element.inner, {**schema, "properties": found.get("properties", {})}, shown(element.name))
