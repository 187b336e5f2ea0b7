"""Estimates maj@k: the chance that the answer that most of k samples give is right.

Guarantees: the estimate of a task is the exact mean over all subsets of ``k`` of its valid samples, as that of pass@k
is; between answers that equally many samples give, one is drawn; a sample without an answer votes for none, and where
no sample of a subset votes, the subset is wrong. Source: self-consistency, Wang et al. 2023, arXiv:2203.11171.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import comb

Vote = tuple[str | None, float]
"""Answer of a sample, ``None`` without one, and its accuracy."""


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Computes the mean over all subsets of ``k`` samples of the accuracy of the answer with the most votes.

    Args:
        votes: Answer and accuracy of each valid sample. Equal answers should have equal accuracies; where they do not,
            their mean counts.
        k: Size of a subset, from 1 to the number of samples.

    Raises:
        ValueError: There are fewer than ``k`` samples.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} samples is not defined")
    earned: dict[str, list[float]] = defaultdict(list)
    for answer, accuracy in votes:
        if answer is not None:
            earned[answer].append(accuracy)
    counts = Counter(map(len, earned.values()))
    shape = tuple(sorted(counts.items()))
    chances = {size: _chance(shape, size, len(votes), k) for size in counts}
    return sum(chances[len(own)] * sum(own) / len(own) for own in earned.values())


@lru_cache(maxsize=4096)
def _chance(shape: tuple[tuple[int, int], ...], own: int, samples: int, k: int) -> float:
    """Computes the chance that one answer wins the vote of ``k`` of all samples.

    Args:
        shape: Pairs of a number of votes and the number of answers with so many votes.
        own: Number of votes of the answer.
        samples: Number of all samples, also of those without an answer.
        k: Size of a subset.
    """
    others = [size for size, many in shape for _ in range(many - (size == own))]
    silent = samples - sum(size * many for size, many in shape)
    total = 0.0
    for most in range(1, min(own, k) + 1):
        ways = _ways(others, silent, most, k - most)
        total += comb(own, most) * sum(count / (ties + 1) for ties, count in ways.items())
    return total / comb(samples, k)


def _ways(others: Sequence[int], silent: int, most: int, room: int) -> dict[int, int]:
    """Counts the ways to draw ``room`` of the other samples without more than ``most`` of one answer, by ties."""
    found: dict[tuple[int, int], int] = {(0, 0): 1}  # by samples drawn, and answers that were drawn ``most`` times
    for size in others:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (drawn, ties), ways in found.items():
            for more in range(min(size, most, room - drawn) + 1):
                longer[drawn + more, ties + (more == most)] += ways * comb(size, more)
        found = longer
    by_ties: dict[int, int] = defaultdict(int)
    for (drawn, ties), ways in found.items():
        by_ties[ties] += ways * comb(silent, room - drawn)
    return by_ties
