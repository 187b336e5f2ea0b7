"""Estimates pass@k: the chance that at least one of k samples of a task is right.

Guarantees: the estimate of a task is unbiased for every number of its valid samples; a task with fewer than k valid
samples says nothing of pass@k and is left out of it alone, and as many tasks as are left are counted beside it.
"""

from collections.abc import Mapping, Sequence
from math import comb


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


def passes(values: Mapping[str, Sequence[float]], samples: int) -> dict[str, dict[str, float]]:
    """Computes ``pass@1`` to ``pass@samples`` of each task that has enough valid samples.

    Args:
        values: Accuracies of each task's valid samples; a sample is right from 1 on.
        samples: Largest number of samples of a task.

    Returns:
        Values by name and task, without names that no task can give.
    """
    found: dict[str, dict[str, float]] = {}
    for k in range(1, samples + 1):
        of_tasks = {
            task: pass_at_k(len(own), sum(value >= 1 for value in own), k)
            for task, own in values.items()
            if len(own) >= k
        }
        if of_tasks:
            found[f"pass@{k}"] = of_tasks
    return found
