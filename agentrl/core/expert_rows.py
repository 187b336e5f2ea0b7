"""Joins the stored experts of several runs of tokens, see :mod:`agentrl.core.experts`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.experts import UNKNOWN, ExpertRows, narrow, wide

NONE_KNOWN: NDArray[Any] = np.zeros((0, 0), np.uint8)  # stored rows where the experts of no token are known


def join(parts: Sequence[NDArray[Any]], counts: Sequence[int]) -> NDArray[Any]:
    """Joins the stored rows of several runs of tokens; :data:`NONE_KNOWN` if the experts of none are known.

    Args:
        parts: Stored rows of each run; without rows where they are not known.
        counts: Number of tokens of each run.

    Raises:
        ValueError: The rows are of models with different layers.
    """
    widths = sorted({part.shape[1] for part in parts if len(part)})
    if not widths:
        return NONE_KNOWN
    if len(widths) > 1:
        raise ValueError(f"rows of {' and '.join(map(str, widths))} experts: they are not of one model")
    each = zip(parts, counts, strict=True)
    rows = [wide(part) if len(part) else np.full((count, widths[0]), UNKNOWN, np.int16) for part, count in each]
    return narrow(np.concatenate(rows))


def both(first: ExpertRows | None, second: ExpertRows | None) -> ExpertRows | None:
    """Joins the rows of tokens with those of the tokens that follow."""
    if first is None or second is None:
        return first if second is None else second
    return ExpertRows.of(np.concatenate([first.array(), second.array()]))
