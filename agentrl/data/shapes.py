"""Generated questions about pictures of colored shapes on a grid: how many of a kind, or the color at a place.

Guarantees: train and test never share a line, whatever the arguments of either; the same arguments give the same lines
in the same order. A line describes its picture, so that nothing is stored or downloaded: the environment draws it.
"""

import json
import random
import zlib
from typing import Any

from agentrl.config.errors import DataError

KINDS = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "yellow")
HELD_OUT = 10  # one in so many lines, chosen by checksum, is held out
_EMPTY = 0.25  # share of cells without a shape
_SEED = 13  # arbitrary, but must not change: published results depend on the lines
_CORNERS = {(0, 0): "top left", (0, 1): "top right", (1, 0): "bottom left", (1, 1): "bottom right"}
_ASKED = ("count", "color")
_TRIES = 100  # draws for each wanted line until it is said that there are not so many


def load(
    split: str, path: str | None, grid: int = 2, ask: str = "both", train: int = 4000, test: int = 200
) -> tuple[list[dict[str, Any]], str]:
    """Generates lines such as ``How many circles are there?``.

    Args:
        split: ``train`` or ``test``.
        path: Must be ``None``; no file is read.
        grid: Number of rows and of columns of the picture.
        ask: ``count``, ``color`` or ``both``.
        train: Number of training lines.
        test: Number of held-out lines.

    Returns:
        Lines ``{"shapes", "grid", "question", "answer"}``, where ``shapes`` are ``[row, column, kind, color]``, and a
        sentence about them.
    """
    if path is not None:
        raise DataError(f"dataset 'shapes' is generated and reads no path, but path was {path!r}")
    if split not in ("train", "test"):
        raise DataError(f"dataset 'shapes' has no split {split!r}; it has train and test")
    if ask not in (*_ASKED, "both"):
        raise DataError(f"dataset 'shapes': ask={ask!r}, want count, color or both")
    if grid < 1 or min(train, test) < 1:
        raise DataError(f"grid={grid}, train={train}, test={test}: want at least 1 of each")
    rng, wanted = random.Random(_SEED), train if split == "train" else test
    found: dict[str, dict[str, Any]] = {}
    for _ in range(_TRIES * wanted + _TRIES):
        line = _line(rng, grid, rng.choice(_ASKED) if ask == "both" else ask)
        key = json.dumps(line)
        if (zlib.crc32(key.encode()) % HELD_OUT == 0) == (split == "test"):
            found.setdefault(key, line)
        if len(found) == wanted:
            break
    else:
        raise DataError(f"grid={grid}, ask={ask}: there are not {wanted} different lines for {split}; ask for fewer")
    return list(found.values()), f"shapes: generated, {grid} x {grid} cells, one of {HELD_OUT} held out"


def _line(rng: random.Random, grid: int, ask: str) -> dict[str, Any]:
    cells = [(row, column) for row in range(grid) for column in range(grid)]
    shapes = [[*cell, rng.choice(KINDS), rng.choice(COLORS)] for cell in cells if rng.random() >= _EMPTY]
    shapes = shapes or [[*rng.choice(cells), rng.choice(KINDS), rng.choice(COLORS)]]
    if ask == "count":
        kind = rng.choice(KINDS)
        question, answer = f"How many {kind}s are there?", str(sum(one[2] == kind for one in shapes))
    else:
        row, column, _, answer = rng.choice(shapes)
        question = f"What color is the shape at the {place_name(row, column, grid)}?"
    return {"shapes": shapes, "grid": grid, "question": question, "answer": answer}


def place_name(row: int, column: int, grid: int) -> str:
    """Returns the words for a cell: a corner of a grid of two, else its row and column from 1."""
    return _CORNERS[row, column] if grid == 2 else f"row {row + 1}, column {column + 1}"
