"""Loads rows of JSON-lines files or of a hub dataset unchanged.

Guarantees: a line that is not a JSON object is refused with its file and number; half of a surrogate pair in a line,
which UTF-8 cannot hold, becomes U+FFFD. The returned sentence names the source. A hub dataset's tables give all
messages, calls and tools of a column the same keys, with ``None`` in those that a row did not have; in the columns of
conversations these are taken out again.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.errors import DataError
from agentrl.core.extras import install_hint
from agentrl.core.valid_text import valid_data
from agentrl.data.hub import endpoint, unreachable

CONVERSATIONS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")  # columns of messages or tools


def load_folder(split: str, path: str | None) -> tuple[list[dict[str, Any]], str]:
    """Loads the lines of ``<path>/<split>.jsonl``.

    Raises:
        DataError: There is no such file, or a line is not a JSON object.
    """
    if path is None:
        raise DataError("dataset 'jsonl' reads a folder: name it with path")
    file = Path(path).expanduser() / f"{split}.jsonl"
    if not file.is_file():
        state = "the folder is there, the file is not" if file.parent.is_dir() else "there is no such folder"
        raise DataError(f"no {file.resolve()} (path={path}; {state})")
    return [line for line, _ in json_lines(file)], f"{file.resolve()}"


def json_lines(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the JSON object of each line of a file and the line's place as ``file:number``; empty lines are skipped.

    Raises:
        DataError: A line is not a JSON object.
    """
    for number, text in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not text.strip():
            continue
        place = f"{file}:{number}"
        try:
            line = _loaded(text)
        except ValueError as error:
            raise DataError(f"{place} is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise DataError(f"{place} is no JSON object: {str(line)[:80]}")
        yield line, place


def _loaded(text: bytes) -> Any:
    """Parses a line; one with halves of surrogate pairs with Python's own parser, because orjson refuses these."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if b"\\ud" not in text.lower():
            raise
    return valid_data(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def load_hub(
    split: str, path: str | None, id: str = "", config: str | None = None
) -> tuple[Iterable[dict[str, Any]], str]:
    """Loads the rows of a hub dataset through ``datasets`` and its cache.

    Args:
        split: Name of the split.
        path: Must be ``None``; no file is read.
        id: Id of the dataset, ``owner/name``.
        config: Name of the dataset's configuration, if it has several.

    Raises:
        DataError: The dataset cannot be loaded; the message says why.
    """
    if path is not None:
        raise DataError(f"dataset {id!r} comes from the hub and reads no path, but path was {path!r}")
    return map(as_written, load_table(split, id, config)), f"{id}: from the hub, through datasets"


def load_table(split: str, id: str, config: str | None = None, **more: Any) -> Any:
    """Returns a hub dataset as a ``datasets.Dataset``, from the hub or the cache.

    Args:
        split: Name of the split.
        id: Id of the dataset, ``owner/name``.
        config: Name of the dataset's configuration, if it has several.
        more: Further arguments of ``datasets.load_dataset``.

    Raises:
        DataError: The dataset cannot be loaded; the message says why.
    """
    try:
        from datasets import config as settings
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"dataset {id!r} needs the package 'datasets': {install_hint('train')}") from error
    reason = unreachable()  # the cache of ``datasets`` is used even if the hub is unreachable
    if reason is not None:
        settings.HF_HUB_OFFLINE = True
    try:
        return load_dataset(id, config, split=split, **more)
    except (OSError, ValueError, DatasetsError) as error:
        what = str(error).strip().splitlines()[0]
        raise DataError(f"dataset {id!r}, split {split!r}: hub {endpoint()}: {reason or what}") from error


def as_written(row: Any) -> dict[str, Any]:
    """Returns a table's row without the ``None`` that the table put into its messages and tools."""
    return {name: _filled_out(value) if name in CONVERSATIONS else value for name, value in dict(row).items()}


def _filled_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled_out(one) for key, one in value.items() if one is not None}
    return [_filled_out(one) for one in value] if isinstance(value, list) else value
