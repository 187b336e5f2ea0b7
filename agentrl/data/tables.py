"""Loads tasks from tables: a JSONL, CSV or parquet file, a folder of them, or a hub dataset.

Guarantees: rows are in the order of the table and made when they are used, those of ``datasets`` from its memory-mapped
file; messages, calls and tools are as they were written (:mod:`agentrl.data.plain`). A file is one table, whatever
split is asked for; a folder's files are told apart by the name of the split in theirs, as ``datasets`` does. What an
environment reads as a text is the text of the file: ``007``, ``NA`` and ``2026-01-02`` are no numbers, gaps or dates
(in a folder's shards of JSON alone, ``datasets`` decides).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from agentrl.config.errors import DataError
from agentrl.core.extras import install_hint
from agentrl.data.json_lines import JsonLines
from agentrl.data.plain import as_written, load_table

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Loaders of ``datasets`` by ending of a file's name."""
NO_ROWS = "it has no rows"


class Rows(Sequence[dict[str, Any]]):
    """Rows of a table, each made when it is asked for.

    Args:
        table: A ``datasets.Dataset``.
    """

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._table.column_names)

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return Rows(self._table.select(range(*index.indices(len(self)))))
        return as_written(self._table[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(as_written, self._table)


def is_table(name: str) -> bool:
    """Whether a dataset's name is that of a file with a table, or of a folder."""
    path = Path(name).expanduser()
    return path.suffix.lower() in FORMATS or path.is_dir()


def load_rows(
    name: str, split: str, kwargs: Mapping[str, Any], texts: Sequence[str] = ()
) -> tuple[Rows | JsonLines, str]:
    """Loads the rows of a file or folder, or of a hub dataset.

    Args:
        name: Path of a file or folder, or ``owner/name`` on the hub.
        split: Name of the split.
        kwargs: Further arguments of ``datasets.load_dataset``; ``config`` names the configuration of a hub dataset.
        texts: Columns that are read as texts.

    Returns:
        The rows, and a sentence about their source.

    Raises:
        DataError: It is not there, or cannot be read.
    """
    path = Path(name).expanduser()
    if not is_table(name):
        found = {"config" if key == "name" else key: value for key, value in kwargs.items()}
        return Rows(load_table(split, name, **found)), f"{name}: from the hub, through datasets"
    if not path.exists():
        raise DataError(f"dataset {name!r}: no such file, {path.resolve()}")
    written = [path] if path.is_file() else [path / f"{split}{suffix}" for suffix in (".jsonl", ".json")]
    for file in written if not kwargs else ():
        if FORMATS[file.suffix.lower()] == "json" and file.is_file():
            return _with_rows(JsonLines(file), name), f"{file.resolve()}"
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DataError(f"dataset {name!r} needs the package 'datasets': {install_hint('train')}") from error
    try:
        more = {**_as_texts(path, texts), **kwargs}
        if path.is_file():
            more = {"path": FORMATS[path.suffix.lower()], "data_files": str(path), "split": "train", **more}
        else:
            more = {"path": str(path), "split": split, **more}
        table = load_dataset(**more)
    except (OSError, ValueError, TypeError, StopIteration, DatasetsError) as error:  # an empty file ends an iterator
        raise DataError(f"dataset {name!r}: {_reason(error)}") from error
    return Rows(table), f"{path.resolve()}"


def _with_rows(rows: JsonLines, name: str) -> JsonLines:
    if not len(rows):
        raise DataError(f"dataset {name!r}: {NO_ROWS}")
    return rows


def _as_texts(path: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments with which the columns of CSV files are read as texts; only an empty cell is a gap."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.suffix.lower() in FORMATS]
    if not files or any(FORMATS[one.suffix.lower()] != "csv" for one in files):
        return {}
    separated = {"sep": "\t"} if all(one.suffix.lower() == ".tsv" for one in files) else {}
    return {"converters": dict.fromkeys(texts, str), "keep_default_na": False, "na_values": [""], **separated}


def _reason(error: Exception) -> str:
    """Returns why a table cannot be read, in one line."""
    text = str(error.__cause__ or error).strip()
    if isinstance(error, StopIteration) or "corresponds to no data" in text:
        return NO_ROWS
    return text.splitlines()[0] if text else type(error).__name__


class Mapped(Sequence[dict[str, Any]]):
    """Rows whose columns have the names that an environment reads, each made when it is asked for.

    Args:
        rows: The rows.
        columns: Name that the environment reads -> name of the column.
        texts: Names whose values an environment reads as texts: a number, as a CSV file's column becomes one, is
            turned into its text.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], texts: Sequence[str] = ()
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._texts = texts

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return Mapped(self._rows[index], self._columns, self._texts)
        row = self._rows[index]
        kept = {name: value for name, value in row.items() if name not in self._columns.values()}
        found = kept | {name: row[column] for name, column in self._columns.items()}
        numbers = [name for name in self._texts if type(found[name]) in (int, float)]
        return found | {name: str(found[name]) for name in numbers}


def check_columns(rows: Sequence[Any], columns: Mapping[str, str], needed: Sequence[str], what: str) -> None:
    """Refuses rows without a column that is mapped or needed.

    Args:
        rows: The rows, before the mapping.
        columns: Name that the environment reads -> name of the column.
        needed: Names that the environment reads.
        what: Key of the section, for the message.

    Raises:
        DataError: A column is missing; the message lists those that there are.
    """
    wanted = {name: columns.get(name, name) for name in (*columns, *needed)}
    known = getattr(rows, "columns", None)
    places = [(0, known)] if known is not None else enumerate(rows)
    for number, row in places:
        missing = [name for name, column in wanted.items() if column not in row]
        if missing:
            name = missing[0]
            there = ", ".join(map(str, row)) or "none"
            asked = f"column {wanted[name]!r}" if name in columns else f"a column {name!r}, which the environment reads"
            where = "the table" if known is not None else f"row {number}"
            raise DataError(
                f"{what}: {where} lacks {asked}. Its columns: {there}. Name the one that holds it with "
                f"{what}.columns.{name}=COLUMN"
            )
