"""The experts that the layers of a mixture of experts chose for tokens: one row of numbers for each token, as bytes.

Guarantees: numbers are as narrow as they can be, uint8 up to expert 254, else uint16; a token whose experts are not
known has a row of :data:`UNKNOWN`, stored as the highest number of the width; the same experts always give the same
bytes. Importing this does not import numpy, so that environments and tools stay light.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNKNOWN = -1
MOST = 2**15 - 1  # highest number of an expert


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
    def of(cls, experts: "NDArray[Any]") -> "ExpertRows":
        """Makes rows of integers ``[tokens, width]``.

        Raises:
            ValueError: It is no such array, or a number is out of range.
        """
        stored = narrow(experts)
        return cls(stored.tobytes(), stored.shape[1], stored.dtype.itemsize)

    def __len__(self) -> int:
        return len(self.data) // (self.width * self.size)

    @property
    def stored(self) -> "NDArray[Any]":
        """The rows as :func:`narrow` stores them."""
        import numpy as np

        return np.frombuffer(self.data, np.uint8 if self.size == 1 else "<u2").reshape(-1, self.width)

    @property
    def unknown(self) -> "NDArray[np.int64]":
        """Indices of the tokens whose experts are not known."""
        import numpy as np

        stored = self.stored
        return np.flatnonzero(stored[:, 0] == np.iinfo(stored.dtype).max)

    def array(self) -> "NDArray[np.int16]":
        """Returns int16 ``[tokens, width]``, -1 where the experts are not known."""
        return wide(self.stored)


def narrow(experts: "NDArray[Any]") -> "NDArray[Any]":
    """Returns integers ``[tokens, width]`` as they are stored: uint8 or uint16.

    Raises:
        ValueError: It is no such array, or a number is out of range.
    """
    import numpy as np

    if experts.ndim != 2 or not experts.shape[1]:
        raise ValueError(f"experts of shape {list(experts.shape)}, want [tokens, numbers of all layers]")
    experts = experts.astype(np.int64, copy=False)
    highest = int(experts.max(initial=UNKNOWN))
    if highest > MOST or int(experts.min(initial=UNKNOWN)) < UNKNOWN:
        raise ValueError(f"experts from {experts.min()} to {highest}, want 0 to {MOST}")
    kind = np.dtype(np.uint8 if highest < np.iinfo(np.uint8).max else "<u2")
    return np.where(experts < 0, np.iinfo(kind).max, experts).astype(kind)


def wide(stored: "NDArray[Any]") -> "NDArray[np.int16]":
    """Returns stored rows as int16, :data:`UNKNOWN` where the experts are not known; the inverse of :func:`narrow`."""
    import numpy as np

    return np.where(stored == np.iinfo(stored.dtype).max, UNKNOWN, stored.astype(np.int32)).astype(np.int16)
