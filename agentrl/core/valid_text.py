"""Replaces text that UTF-8 cannot hold, and makes text safe to print on a terminal.

Guarantees: text that is valid comes back as the same object. Half a surrogate pair becomes U+FFFD (the replacement
character); two halves that belong together become the character that they stand for. Data keeps its other values
unchanged. JSON can write half a pair as an escape, and an API, a tool or a dataset that cuts text by UTF-16 units does;
a tokenizer, a file and an HTTP body refuse it.
"""

import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def valid_text(text: str) -> str:
    """Returns ``text`` with each half of a surrogate pair replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def valid_data(value: Any) -> Any:
    """Returns ``value`` with the texts in it replaced as by :func:`valid_text`, keys of dicts included.

    Args:
        value: Text, a dict, list or tuple of such values, or anything else, which is returned as it is.
    """
    if isinstance(value, str):
        return valid_text(value)
    if type(value) is dict:
        new = {valid_data(key): valid_data(one) for key, one in value.items()}
        same = all(a is b and value[a] is new[b] for a, b in zip(value, new, strict=False))
        return value if same and len(new) == len(value) else new
    if type(value) in (list, tuple):
        items = [valid_data(one) for one in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
    return value


def printable(text: str) -> str:
    """Returns ``text`` with control characters as escapes, but for tabs and line ends.

    A terminal obeys such characters; text of a model or an environment must not move its cursor or set its title.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), valid_text(text))
