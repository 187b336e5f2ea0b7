"""The experts that the layers of a mixture of experts chose for tokens: one row of numbers for each token.

Guarantees: numbers are as narrow as they can be, uint8 up to expert 254, else uint16; a token whose experts are not
known has a row of :data:`UNKNOWN`, stored as the highest number of the width; the same experts always give the same
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
MOST = int(np.iinfo(np.int16).max)  # highest number of an expert
NONE_KNOWN: NDArray[Any] = np.zeros((0, 0), np.uint8)  # stored rows where the experts of no token are known


@dataclass(frozen=True)
class ExpertRows:
    """Experts of some tokens, as bytes.

    Attributes:
        data: The stored rows.
        width: Numbers in a row: those of all layers, one layer after the other.
        size: Bytes of a number, 1 or 2.
    """

    data: bytes
    width: int
    size: int

    @classmethod
    def of(cls, experts: NDArray[Any]) -> "ExpertRows":
        """Makes rows of integers ``[tokens, width]``.

        Raises:
            ValueError: It is no such array, or a number is out of range.
        """
        stored = narrow(experts)
        return cls(stored.tobytes(), stored.shape[1], stored.dtype.itemsize)

    def __len__(self) -> int:
        return len(self.data) // (self.width * self.size)

    @property
    def stored(self) -> NDArray[Any]:
        """The rows as :func:`narrow` stores them."""
        return np.frombuffer(self.data, np.uint8 if self.size == 1 else "<u2").reshape(-1, self.width)

    @property
    def unknown(self) -> NDArray[np.int64]:
        """Indices of the tokens whose experts are not known."""
        stored = self.stored
        return np.flatnonzero(stored[:, 0] == np.iinfo(stored.dtype).max)

    def array(self) -> NDArray[np.int16]:
        """Returns int16 ``[tokens, width]``, :data:`UNKNOWN` where the experts are not known."""
        return wide(self.stored)


def narrow(experts: NDArray[Any]) -> NDArray[Any]:
    """Returns integers ``[tokens, width]`` as they are stored: uint8 or uint16.

    Raises:
        ValueError: It is no such array, or a number is out of range.
    """
    if experts.ndim != 2 or not experts.shape[1]:
        raise ValueError(f"experts of shape {list(experts.shape)}, want [tokens, numbers of all layers]")
    experts = experts.astype(np.int64, copy=False)
    highest = int(experts.max(initial=UNKNOWN))
    if highest > MOST or int(experts.min(initial=UNKNOWN)) < UNKNOWN:
        raise ValueError(f"experts from {experts.min()} to {highest}, want 0 to {MOST}")
    kind = np.dtype(np.uint8 if highest < np.iinfo(np.uint8).max else "<u2")
    return np.where(experts < 0, np.iinfo(kind).max, experts).astype(kind)


def wide(stored: NDArray[Any]) -> NDArray[np.int16]:
    """Returns stored rows as int16, :data:`UNKNOWN` where the experts are not known; the inverse of :func:`narrow`."""
    return np.where(stored == np.iinfo(stored.dtype).max, UNKNOWN, stored.astype(np.int32)).astype(np.int16)


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
