"""Loads rows of JSON-lines files or of a hub dataset unchanged.

Guarantees: the returned sentence names the source. A hub dataset's tables give all messages, calls and tools of a
column the same keys, with ``None`` in those that a row did not have; in the columns of conversations these are taken
out again. Dates and decimal numbers of a table's own types become their texts, as a record of JSON holds them.
"""

from collections.abc import Iterable
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from agentrl.config.errors import DataError
from agentrl.core.extras import install_hint
from agentrl.data.hub import endpoint, unreachable
from agentrl.data.json_lines import json_lines

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
    return {name: _filled_out(value) if name in CONVERSATIONS else _plain(value) for name, value in dict(row).items()}


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date | time) else str(value) if isinstance(value, Decimal) else value


def _filled_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled_out(one) for key, one in value.items() if one is not None}
    return [_filled_out(one) for one in value] if isinstance(value, list) else value
