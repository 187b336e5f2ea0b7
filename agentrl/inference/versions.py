"""Reads policy versions from the labels of servers."""

from typing import Any


def version_number(label: str) -> int:
    """Policy version of a server's label; 0 if it is no number, such as ``default``, the label before a weight push."""
    return int(label) if str(label).isdigit() else 0


def versions_of(spans: Any, tokens: int) -> list[int]:
    """Policy version of each token, from a server's spans ``{version, start, end}``.

    Raises:
        ValueError: A token is in no span, so its policy version is unknown.
    """
    if len(spans) == 1 and spans[0]["start"] == 0 and spans[0]["end"] >= tokens:
        return [version_number(spans[0]["version"])] * tokens
    versions: list[int | None] = [None] * tokens
    for span in spans:
        for index in range(span["start"], min(span["end"], tokens)):
            versions[index] = version_number(span["version"])
    known = [version for version in versions if version is not None]
    if len(known) < tokens:
        raise ValueError(f"weight_versions cover only {len(known)} of {tokens} tokens")
    return known
