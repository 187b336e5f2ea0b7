"""Generated calculations that need a tool: sums, differences and products of numbers with several digits.

Guarantees: train and test never share a line, whatever the arguments of either; the same arguments give the same lines
in the same order.
"""

import random
import zlib
from typing import Any

from agentrl.config.errors import DataError

HELD_OUT = 10  # one in so many expressions, chosen by checksum, is held out
_SEED = 11  # arbitrary, but must not change: published results depend on the lines
_SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def load(
    split: str, path: str | None, digits: int = 3, train: int = 4000, test: int = 200
) -> tuple[list[dict[str, Any]], str]:
    """Generates lines such as ``What is 348 * 27?``.

    Args:
        split: ``train`` or ``test``.
        path: Must be ``None``; no file is read.
        digits: Largest number of digits of an operand, at least 2.
        train: Number of training lines.
        test: Number of held-out lines.

    Returns:
        Lines ``{"question", "expression", "answer"}``, and a sentence about them.
    """
    if path is not None:
        raise DataError(f"dataset 'calculation' is generated and reads no path, but path was {path!r}")
    if split not in ("train", "test"):
        raise DataError(f"dataset 'calculation' has no split {split!r}; it has train and test")
    largest = 10**digits - 1
    if digits < 2 or min(train, test) < 1 or max(train, test * HELD_OUT) > largest**2:
        raise DataError(
            f"digits={digits}, train={train}, test={test}: want at least 2 digits and fewer lines than pairs"
        )
    rng = random.Random(_SEED)
    wanted = train if split == "train" else test
    found: dict[str, int] = {}
    while len(found) < wanted:
        a, b, sign = rng.randint(10, largest), rng.randint(10, largest), rng.choice(list(_SIGNS))
        if (zlib.crc32(f"{a} {sign} {b}".encode()) % HELD_OUT == 0) == (split == "test"):
            found.setdefault(f"{a} {sign} {b}", _SIGNS[sign](a, b))
    lines = [{"question": f"What is {e}?", "expression": e, "answer": str(value)} for e, value in found.items()]
    return lines, f"calculation: generated, operands of 2 to {digits} digits, one of {HELD_OUT} held out"
