"""Sums and means over the tokens of each sequence, and bounded ratios; only methods of tensors, no import of torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sequence_means(values: "Tensor", sequences: "Tensor") -> "Tensor":
    """Returns at each token the mean over the tokens of its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(values.new_ones(len(values)), sequences)


def sequence_sums(values: "Tensor", sequences: "Tensor") -> "Tensor":
    """Returns at each token the sum over the tokens of its sequence."""
    _, place = sequences.unique(return_inverse=True)
    count = int(place.max()) + 1 if len(place) else 0
    return values.new_zeros(count).index_add(0, place, values)[place]


def bounded_exp(log_ratios: "Tensor") -> "Tensor":
    """Returns ``exp(log_ratios)``, at most e^80: float32 ends at e^88, and infinity times 0 gives a NaN gradient."""
    return log_ratios.clamp(max=80.0).exp()
