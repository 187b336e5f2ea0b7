"""Sums of two small numbers, for learning proofs and examples.

Guarantees: train and test never share an ordered pair; the held-out pairs depend only on the arguments.
"""

import random
from collections.abc import Iterable
from typing import Any

from agentrl.config.errors import DataError

_SPLIT_SEED = 7  # arbitrary, but must not change: published results depend on the held-out pairs


def load(
    split: str, path: str | None, max_operand: int = 50, held_out: int = 200, one_digit_repeats: int = 1
) -> tuple[Iterable[dict[str, Any]], str]:
    """Generates all sums ``a + b`` with ``0 <= a, b <= max_operand``.

    Args:
        split: ``train`` or ``test``.
        path: Must be ``None``; no file is read.
        max_operand: Largest operand.
        held_out: Number of ordered pairs in ``test``.
        one_digit_repeats: Number of occurrences of a training pair with an operand below 10, which small models find
            harder than sums of two numbers of equal length.

    Returns:
        Lines ``{"a", "b", "question", "answer"}``, and a sentence about them.
    """
    if path is not None:
        raise DataError(f"dataset 'arithmetic' is generated and reads no path, but path was {path!r}")
    pairs = [(a, b) for a in range(max_operand + 1) for b in range(max_operand + 1)]
    if not 0 < held_out < len(pairs):
        raise DataError(f"held_out was {held_out}, but must be between 1 and {len(pairs) - 1} of {len(pairs)} pairs")
    random.Random(_SPLIT_SEED).shuffle(pairs)
    parts = {"test": pairs[:held_out], "train": pairs[held_out:]}
    if split not in parts:
        raise DataError(f"dataset 'arithmetic' has no split {split!r}; it has train and test")
    if split == "train":
        parts["train"] = [pair for pair in parts["train"] for _ in range(one_digit_repeats if min(pair) < 10 else 1)]
    lines = [{"a": a, "b": b, "question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in parts[split]]
    return lines, f"arithmetic: generated, operands 0 to {max_operand}, {held_out} pairs held out"
