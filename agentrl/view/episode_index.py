"""Index of a run's episodes: a table that is sorted, filtered and searched in milliseconds.

Guarantees: the index says what the files say. It is built from the newest episode backwards, so that the newest are
there at once while the rest is read; what it has not read yet is counted in :attr:`Page.unread`. It follows a file that
grows, starts anew for a file that was replaced or became shorter, and a process that is killed leaves it whole. It
lies in the user's cache folder, never in the run's, and may be deleted at any time.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.errors import UserError
from agentrl.host.cache_folder import cache_folder
from agentrl.view.episode_files import KINDS, EpisodeFile, episode_file, parse
from agentrl.view.episode_row import EpisodeRow, row_of
from agentrl.view.search_query import NUMBERS, TEXTS, Condition, metric_path
from agentrl.view.search_query import parse as parse_query

FORMAT = 5  # of the tables; another one is built anew
FIRST_CHUNK, CHUNK = 1 << 20, 2 << 20  # bytes read at once: the newest are there soon, and others wait shortly
MOST_ROWS = 500  # of one page
_JOURNAL = "journal.jsonl"
_COLUMNS = [name for name in EpisodeRow._fields if name != "text"]
_SHOWN = ", ".join(["e.place", "e.length", *(f"e.{name}" for name in _COLUMNS), "t.step", "t.step - e.oldest"])
_FROM = "FROM episodes e LEFT JOIN trained t ON e.kind = 'train' AND t.group_id = e.group_id"
_TEXT = " JOIN texts x ON x.kind = e.kind AND x.place = e.place"
_SORTS = {**NUMBERS, **TEXTS, "place": "e.place"}
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (kind TEXT PRIMARY KEY, identity TEXT, damaged INTEGER);
CREATE TABLE IF NOT EXISTS covered (kind TEXT, first INTEGER, end INTEGER);
CREATE TABLE IF NOT EXISTS trained (group_id TEXT PRIMARY KEY, step INTEGER);
CREATE TABLE IF NOT EXISTS journal (identity TEXT, end INTEGER);
CREATE TABLE IF NOT EXISTS episodes (kind TEXT, place INTEGER, length INTEGER, {", ".join(_COLUMNS)},
    PRIMARY KEY (kind, place));
CREATE INDEX IF NOT EXISTS by_group ON episodes (kind, group_id);
CREATE INDEX IF NOT EXISTS by_task ON episodes (kind, task);
CREATE TABLE IF NOT EXISTS texts (kind TEXT, place INTEGER, text TEXT, PRIMARY KEY (kind, place));
PRAGMA user_version = {FORMAT};
"""
_INSERT = f"INSERT OR REPLACE INTO episodes VALUES ({', '.join('?' * (len(_COLUMNS) + 3))})"


@dataclass(frozen=True)
class Page:
    """A part of the table.

    Attributes:
        rows: Rows by field name, with ``place``, ``length`` (bytes), ``trained`` (step) and ``age``.
        total: Number of episodes that the filter lets through, of those read so far.
        all: Number of episodes read so far.
        unread: Bytes of the file that are not read yet.
        size: Bytes of the file.
        damaged: Number of lines that are no episodes.
    """

    rows: list[dict[str, Any]]
    total: int
    all: int
    unread: int
    size: int
    damaged: int


class EpisodeIndex:
    """Index of the episodes of one run.

    Args:
        folder: Folder of the run.
        cache: Folder of the indexes; by default ``view`` in the cache folder.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder.resolve()
        home = cache or cache_folder() / "view"
        home.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        self.path = home / f"{self.folder.name[:40]}-{name}.sqlite"
        self._files: dict[str, EpisodeFile] = {kind: episode_file(self.folder, kind) for kind in KINDS}
        self._lock = threading.Lock()
        self._prepare()

    def _prepare(self) -> None:
        with self._open() as db:
            if db.execute("PRAGMA user_version").fetchone()[0] == FORMAT:
                return
        for file in self.path.parent.glob(f"{self.path.name}*"):
            file.unlink()
        with self._open() as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_SCHEMA)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=30.0)) as db:
            db.execute("PRAGMA synchronous = OFF")  # it can be built anew
            yield db

    def update(self, chunks: int | None = None, *, new_only: bool = False) -> bool:
        """Read what is new, then what is older; returns whether something is left to read.

        Args:
            chunks: Number of chunks to read at most; by default all.
            new_only: Whether to read only what a file has grown by.
        """
        with self._lock, self._open() as db:
            self._follow_journal(db)
            for kind, file in self._files.items():
                self._check(db, kind, file)
            known = {kind: self._read_end(db, kind) if new_only else 0 for kind in KINDS}
            while (left := self._left(db, known)) and chunks != 0:
                kind, first, end = max(left, key=lambda gap: (gap[0] == "train") + 2 * self._is_newest(db, gap))
                self._read(db, kind, self._chunk(db, kind, first, end), end)
                chunks = None if chunks is None else chunks - 1
            return bool(left)

    def _left(self, db: sqlite3.Connection, known: dict[str, int]) -> list[tuple[str, int, int]]:
        """Returns the unread parts of both files that begin at the byte that ``known`` names, or later."""
        found = [gap for kind, file in self._files.items() for gap in self._gaps(db, kind, file.size())]
        return [gap for gap in found if gap[1] >= known[gap[0]]]

    def _read_end(self, db: sqlite3.Connection, kind: str) -> int:
        return db.execute("SELECT max(end) FROM covered WHERE kind = ?", (kind,)).fetchone()[0] or 0

    def _is_newest(self, db: sqlite3.Connection, gap: tuple[str, int, int]) -> bool:
        """Whether nothing of the gap's end is read, as when a file has grown or is new."""
        return gap[1] >= self._read_end(db, gap[0])

    def _chunk(self, db: sqlite3.Connection, kind: str, first: int, end: int) -> int:
        began = db.execute("SELECT 1 FROM covered WHERE kind = ? LIMIT 1", (kind,)).fetchone()
        return max(first, end - (CHUNK if began else FIRST_CHUNK))

    def _check(self, db: sqlite3.Connection, kind: str, file: EpisodeFile) -> None:
        """Forgets what was read from another file of this name."""
        known = db.execute("SELECT identity FROM files WHERE kind = ?", (kind,)).fetchone()
        size = file.size()
        end = self._read_end(db, kind)
        identity = file.identity() if size else ""
        if known is not None and size >= end and identity.startswith(known[0]):
            if identity != known[0]:
                db.execute("UPDATE files SET identity = ? WHERE kind = ?", (identity, kind))
                db.commit()
            return
        for table in ("files", "covered", "episodes", "texts"):
            db.execute(f"DELETE FROM {table} WHERE kind = ?", (kind,))
        db.execute("INSERT INTO files VALUES (?, ?, 0)", (kind, identity))
        db.commit()

    def _gaps(self, db: sqlite3.Connection, kind: str, size: int) -> list[tuple[str, int, int]]:
        """Returns the parts of a file that are not read yet; its last line may be half written."""
        found, at = [], 0
        for first, end in db.execute("SELECT first, end FROM covered WHERE kind = ? ORDER BY first", (kind,)):
            if first > at:
                found.append((kind, at, first))
            at = max(at, end)
        if size > at and (end := self._files[kind].whole_end(at, size)) > at:
            found.append((kind, at, end))
        return found

    def _read(self, db: sqlite3.Connection, kind: str, first: int, end: int) -> None:
        """Adds the episodes of a part of a file, and notes that it was read, in one transaction."""
        episodes, texts, damaged, at = [], [], 0, None
        for line in self._files[kind].lines(first, end):
            at = line.place if at is None else at
            record = parse(line.data)
            row = None if record is None else row_of(record)
            if row is None:
                damaged += 1
                continue
            episodes.append((kind, line.place, line.length, *row[:-1]))
            texts.append((kind, line.place, row.text))
        with db:
            db.executemany(_INSERT, episodes)
            db.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?)", texts)
            db.execute("UPDATE files SET damaged = damaged + ? WHERE kind = ?", (damaged, kind))
            begun = first if at is None else at  # a longer line reaches into the part before
            self._cover(db, kind, begun if first else 0, end)

    def _cover(self, db: sqlite3.Connection, kind: str, first: int, end: int) -> None:
        known = [*db.execute("SELECT first, end FROM covered WHERE kind = ?", (kind,)), (first, end)]
        merged: list[list[int]] = []
        for begin, stop in sorted(known):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([begin, stop])
        db.execute("DELETE FROM covered WHERE kind = ?", (kind,))
        db.executemany("INSERT INTO covered VALUES (?, ?, ?)", [(kind, *part) for part in merged])

    def _follow_journal(self, db: sqlite3.Connection) -> None:
        """Reads from the journal which step trained each group."""
        file = EpisodeFile(self.folder / _JOURNAL)
        size = file.size()
        if not size:
            return
        known = db.execute("SELECT identity, end FROM journal").fetchone() or ("", 0)
        identity = file.identity()[:64]
        end = known[1] if known[0] == identity and known[1] <= size else 0
        steps = []
        for line in file.lines(end, size):
            record = parse(line.data) or {}
            if record.get("outcome") == "trained":
                steps.append((f"g{record['draw']}", record["step"]))
            end = line.place + line.length
        with db:
            if not known[1]:
                db.execute("DELETE FROM trained")
            db.executemany("INSERT OR REPLACE INTO trained VALUES (?, ?)", steps)
            db.execute("DELETE FROM journal")
            db.execute("INSERT INTO journal VALUES (?, ?)", (identity, end))

    def page(
        self,
        kind: str = "train",
        query: str = "",
        *,
        sort: str = "place",
        descending: bool = True,
        offset: int = 0,
        limit: int = 100,
        task: str | None = None,
    ) -> Page:
        """Returns a part of the table.

        Args:
            kind: ``train`` or ``eval``.
            query: Filter, see :mod:`agentrl.view.search_query`.
            sort: Field to sort by, or the name of a metric; rows without a value come last.
            descending: Whether the largest come first.
            offset: Number of rows before the page.
            limit: Number of rows.
            task: Id of the task that all rows are of; ``None`` for any.

        Raises:
            UserError: The query cannot be read, or there is no such field.
        """
        episode_file(self.folder, kind)
        with self._open() as db:
            names = self._metric_names(db, kind)
            condition = parse_query(query, names)
            if task is not None:
                condition.add("e.task = ?", task)
            order, values = self._order(sort, names, descending)
            source = f"{_FROM}{_TEXT * condition.by_text} WHERE e.kind = ? AND {condition.sql}"
            rows = db.execute(
                f"SELECT {_SHOWN} {source} ORDER BY {order} LIMIT ? OFFSET ?",
                (kind, *condition.values, *values, min(limit, MOST_ROWS), max(0, offset)),
            ).fetchall()
            total, every = self._counts(db, kind, condition, source)
            size = self._files[kind].size()
            unread = size - sum(end - first for first, end in self._covered(db, kind))
            damaged = db.execute("SELECT damaged FROM files WHERE kind = ?", (kind,)).fetchone()
        return Page([_shown(row) for row in rows], total, every, unread, size, damaged[0] if damaged else 0)

    def _covered(self, db: sqlite3.Connection, kind: str) -> list[tuple[int, int]]:
        return db.execute("SELECT first, end FROM covered WHERE kind = ?", (kind,)).fetchall()

    def _counts(self, db: sqlite3.Connection, kind: str, condition: Condition, source: str) -> tuple[int, int]:
        every = db.execute("SELECT count(*) FROM episodes WHERE kind = ?", (kind,)).fetchone()[0]
        if not condition.parts:
            return every, every
        return db.execute(f"SELECT count(*) {source}", (kind, *condition.values)).fetchone()[0], every

    def _order(self, sort: str, metrics: list[str], descending: bool) -> tuple[str, tuple[Any, ...]]:
        if sort not in _SORTS and sort not in metrics:
            raise UserError(f"no field {sort!r} to sort by. Fields: {', '.join([*_SORTS, *metrics])}")
        way = "DESC" if descending else "ASC"
        if sort == "place":
            return f"e.place {way}", ()
        column, values = (_SORTS[sort], ()) if sort in _SORTS else ("json_extract(e.metrics, ?)", (metric_path(sort),))
        return f"{column} {way} NULLS LAST, e.place DESC", values

    def unread(self) -> int:
        """Returns the number of bytes of both files that are not read yet."""
        with self._open() as db:
            covered = sum(end - first for kind in KINDS for first, end in self._covered(db, kind))
        return sum(file.size() for file in self._files.values()) - covered

    def metric_names(self, kind: str) -> list[str]:
        """Returns the names of the environment's metrics in the newest episodes."""
        with self._open() as db:
            return self._metric_names(db, kind)

    def _metric_names(self, db: sqlite3.Connection, kind: str) -> list[str]:
        newest = db.execute("SELECT metrics FROM episodes WHERE kind = ? ORDER BY place DESC LIMIT 200", (kind,))
        return sorted({name for (text,) in newest for name in orjson.loads(text)})

    def choices(self, kind: str) -> dict[str, list[str]]:
        """Returns the stop reasons and tags that there are, the most frequent first."""
        with self._open() as db:
            return {
                name: [
                    value
                    for (value,) in db.execute(
                        f"SELECT {name} FROM episodes WHERE kind = ? AND {name} IS NOT NULL "
                        f"GROUP BY {name} ORDER BY count(*) DESC LIMIT 50",
                        (kind,),
                    )
                ]
                for name in ("stop", "tag")
            }

    def members(self, kind: str, group_id: str) -> list[dict[str, Any]]:
        """Returns the rows of a group, by member and attempt."""
        with self._open() as db:
            rows = db.execute(
                f"SELECT {_SHOWN} {_FROM} WHERE e.kind = ? AND e.group_id = ? ORDER BY e.member, e.attempt, e.place",
                (kind, group_id),
            ).fetchall()
        return [_shown(row) for row in rows]


def _shown(row: tuple[Any, ...]) -> dict[str, Any]:
    found = dict(zip(["place", "length", *_COLUMNS, "trained", "age"], row, strict=True))
    found["metrics"] = orjson.loads(found["metrics"])
    for name in ("failed", "retried"):
        found[name] = bool(found[name])
    return found
