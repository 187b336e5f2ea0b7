"""Policy versions as servers label them."""

from typing import Any


def version_number(label: str) -> int:
    """Policy version behind a server's label; servers that were not started by us say ``default``."""
    return int(label) if str(label).isdigit() else 0


def versions_of(spans: Any, tokens: int) -> list[int]:
    """Policy version of each token, from a server's spans ``{version, start, end}``.

    Raises:
        ValueError: A token is in no span: which weights sampled it is not known.
    """
    if len(spans) == 1 and spans[0]["start"] == 0 and spans[0]["end"] >= tokens:
        return [version_number(spans[0]["version"])] * tokens
    versions: list[int | None] = [None] * tokens
    for span in spans:
        for index in range(span["start"], min(span["end"], tokens)):
            versions[index] = version_number(span["version"])
    known = [version for version in versions if version is not None]
    if len(known) < tokens:
        raise ValueError(f"weight_versions tell the version of {len(known)} of {tokens} tokens")
    return known
