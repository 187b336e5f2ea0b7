"""Chooses which numbers of a step fit into a terminal.

Guarantees: the table is never wider than asked for, and no number is cut; what has no column is written below it, so
that every number of the last step is on the screen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

Record = Mapping[str, float]
SUCCESS = ("accuracy", "success", "solved", "found")  # metrics that say how often a task was solved, best known first
GAP = 2  # blanks between two columns


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        head: Heading.
        key: Name of the number in a record.
        digits: Digits after the point.
    """

    head: str
    key: str
    digits: int

    def shown(self, record: Record) -> str:
        """Formats the record's number; a dash where it has none."""
        return f"{record[self.key]:.{self.digits}f}" if self.key in record else "-"

    def width(self, records: Sequence[Record]) -> int:
        """Characters of the widest cell, or of the heading."""
        return max(len(self.head), *(len(self.shown(record)) for record in records))


def columns_of(records: Sequence[Record]) -> list[Column]:
    """Lists all columns of some steps, the most important first."""
    names = sorted({name.removeprefix("metrics/") for one in records for name in one if name.startswith("metrics/")})
    success = next((name for name in (*SUCCESS, *names) if name in names), None)
    first = [Column("step", "step", 0), Column("reward", "reward/mean_drawn", 3)]
    first += [Column(success, f"metrics/{success}", 3)] if success is not None else []
    first += [Column("tokens", "tokens/completion_mean", 1), Column("age", "staleness/mean", 1)]
    first += [Column("step s", "time/step", 1)]
    rest = [Column(name, f"metrics/{name}", 3) for name in names if name != success]
    rest += [Column("wait s", "time/wait_batch", 1), Column("update s", "time/update", 1)]
    return [column for column in (*first, *rest) if any(column.key in record for record in records)]


def step_table(records: Sequence[Record], width: int) -> Group:
    """Builds the table of the steps, with the numbers that do not fit below.

    Args:
        records: Metrics of the steps shown, in order; at least one.
        width: Characters that the table may take.
    """
    columns = columns_of(records)
    fitting: list[Column] = []
    room = width + GAP
    for column in columns:
        needed = column.width(records) + GAP
        if needed <= room:
            room -= needed
            fitting.append(column)
    table = Table(box=None, pad_edge=False, padding=(0, GAP // 2))
    for column in fitting:
        table.add_column(column.head, justify="right", no_wrap=True)
    for record in records:
        table.add_row(*(column.shown(record) for column in fitting))
    rest = [f"{column.head} {column.shown(records[-1])}" for column in columns if column not in fitting]
    return Group(table, Text(f"also: {', '.join(rest)}", style="dim")) if rest else Group(table)
