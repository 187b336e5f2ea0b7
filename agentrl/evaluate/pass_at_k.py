"""Estimates pass@k, the chance that at least one of k samples of a task is right, and pass^k, that all of them are.

Guarantees: the estimate of a task is unbiased for every number of its valid samples; a task with fewer than k valid
samples says nothing of pass@k and pass^k and is left out of them alone, and as many tasks as are left are counted
beside them.
"""

from collections.abc import Sequence
from math import comb

from agentrl.evaluate.votes import Vote, majority_at_k

SUBSETS = ("pass@", "pass^", "maj@")
"""Beginnings of the names of estimates that are of subsets of k samples."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Computes the share of the subsets of ``k`` samples that hold a right one (Chen et al. 2021, arXiv:2107.03374).

    Args:
        samples: Number of valid samples of the task.
        right: Number of right ones among them.
        k: Size of a subset, from 1 to ``samples``.

    Raises:
        ValueError: The task has fewer than ``k`` samples, or ``right`` is not among them.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right ones is not defined")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def pass_hat_k(samples: int, right: int, k: int) -> float:
    """Computes the share of the subsets of ``k`` samples that are all right (Yao et al. 2024, arXiv:2406.12045).

    Args:
        samples: Number of valid samples of the task.
        right: Number of right ones among them.
        k: Size of a subset, from 1 to ``samples``.

    Raises:
        ValueError: The task has fewer than ``k`` samples, or ``right`` is not among them.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass^{k} of {samples} samples with {right} right ones is not defined")
    return comb(right, k) / comb(samples, k)


def of_subsets(votes: Sequence[Vote], samples: int) -> dict[str, float]:
    """Computes ``pass@k``, ``pass^k`` and ``maj@k`` of a task, for all k that its valid samples give.

    Args:
        votes: Answer and accuracy of each valid sample; a sample is right from 1 on. Without any answer there is no
            ``maj@k``. It is computed for the powers of two and the number of valid samples.
        samples: Largest number of samples of a task.
    """
    right, valid = sum(accuracy >= 1 for _, accuracy in votes), len(votes)
    found: dict[str, float] = {}
    for k in range(1, min(samples, valid) + 1):
        found[f"pass@{k}"] = pass_at_k(valid, right, k)
        found[f"pass^{k}"] = pass_hat_k(valid, right, k)
        if any(answer is not None for answer, _ in votes) and (k == samples or k & (k - 1) == 0):
            found[f"maj@{k}"] = majority_at_k(votes, k)
    return found
