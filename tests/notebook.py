"""Runs a notebook's cells in order in one process with a running event loop: ``python -m tests.notebook FILE CELLS``.

Guarantees: as in Jupyter, all cells share ``__main__``, may ``await``, and the value of a last expression is shown; an
error ends the program with its traceback. After the cell tagged ``parameters`` and at the end come the two texts of the
JSON list CELLS.
"""

import ast
import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any


def cells_of(notebook: Path, parameters: str, after: str) -> list[str]:
    """The code cells, with the two given ones put in."""
    found: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "a notebook is kept without outputs"
            found.append("".join(cell["source"]))
            found += [parameters] if "parameters" in cell["metadata"].get("tags", []) else []
    return [*found, after]


async def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run one cell, and show the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
    code = compile(ast.fix_missing_locations(tree), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        await result
    if isinstance(last, ast.Expr) and names["_"] is not None:
        print(repr(names["_"]))


async def main(notebook: Path, given: str) -> None:
    """Run all cells."""
    for source in cells_of(notebook, *json.loads(given)):
        await run_cell(source, vars(sys.modules["__main__"]))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
