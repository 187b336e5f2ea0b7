"""Prints the comparison of two evaluations.

Guarantees: the tables fit 80 columns; tasks that were not compared are counted.
"""

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.evaluate.compare import Comparison, Difference
from agentrl.observe.summary import Fitting, shown_change, shown_value

MOST_FLIPS = 12  # task ids that are printed of each direction


def print_comparison(found: Comparison, first: Path, second: Path, console: Console) -> None:
    """Prints what two evaluations differ in."""
    for name, path in (("A", first), ("B", second)):
        console.print(f"{name}       {path}", highlight=False, markup=False, soft_wrap=True)
    for one in found.setups:
        console.print(f"differs {one}", highlight=False, markup=False, soft_wrap=True)
    console.print(comparison_table(found))
    only = f"judged only in A: {found.only[0]}, only in B: {found.only[1]}"
    changed = f"; {found.changed} have other contents" if found.changed else ""
    console.print(f"{found.tasks} tasks compared; {only}{changed}", highlight=False)
    main = next((found.differences[name] for name in ("accuracy", "reward") if name in found.differences), None)
    if main is not None:
        for direction, tasks in (("better", main.gained), ("worse", main.lost)):
            more = f", and {len(tasks) - MOST_FLIPS} more" if len(tasks) > MOST_FLIPS else ""
            shown = f": {', '.join(tasks[:MOST_FLIPS])}{more}" if tasks else ""
            console.print(f"{len(tasks)} tasks {direction} in B{shown}", highlight=False, markup=False)


def comparison_table(found: Comparison) -> Fitting:
    """Builds a table with a row for each metric."""
    table = Table(title="B against A, paired by task")
    table.add_column("", overflow="fold")
    for column in ("A", "B", r"B - A \[95% interval]", "p"):
        table.add_column(column, justify="right")
    changes = {
        name: (one.change.mean, one.change.low, one.change.high, one.change.tasks)
        for name, one in found.differences.items()
    }
    for name, one in found.differences.items():
        values = shown_value(name, one.first), shown_value(name, one.second)
        table.add_row(escape(name), *values, shown_change(name, changes), shown_p(one))
    return Fitting(table)


def shown_p(one: Difference) -> str:
    """Formats a p-value."""
    if math.isnan(one.p):
        return "-"
    return "< 0.0001" if one.p < 0.0001 else f"{one.p:.4f}"
