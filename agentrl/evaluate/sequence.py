"""Computes a confidence sequence: intervals of a mean that hold at all numbers of tasks together.

Guarantees: with a probability of 95% the mean lies in the intervals of *all* numbers of tasks, so looking after each
task and stopping when one likes, also because of what was seen, keeps the level; this is exact for every number of
tasks and every distribution of independent values within 0 and 1.

It is the two-sided beta-binomial mixture of Howard, Ramdas, McAuliffe and Sekhon 2021 (Annals of Statistics 49(2),
arXiv:1810.08240, section 3), which goes back to Robbins 1970. For each candidate mean ``p``, the likelihood ratio of a
Bernoulli variable of mean ``q`` against one of mean ``p``, averaged over ``q`` from a beta distribution around ``p``,
is a martingale under ``p``, and by Ville's inequality it reaches 1/0.05 with a probability of at most 0.05. For values
between 0 and 1 each ratio is convex in the value, so its mean is at most that of a Bernoulli variable's: 1.
"""

import math
from typing import Any

from agentrl.evaluate.intervals import CONFIDENCE

_TASKS_PER_PRIOR = 8.5  # of the prior's weight, at the wanted width: where the interval is narrowest, z^2 = 9.2
_Z_SQUARED = 9.2
_EDGE = 1e-12
_HALVINGS = 45


def prior_weight(half_width: float) -> float:
    """Returns the weight of the mixture's prior, in tasks, that suits a wanted half width.

    Args:
        half_width: Half the width at which the sequence is to be narrow; the interval holds with any weight.
    """
    return max(_Z_SQUARED * 0.25 / half_width**2 / _TASKS_PER_PRIOR, 1.0)


def tasks_needed(half_width: float, mean: float = 0.5) -> int:
    """Returns about how many tasks the sequence needs to be so narrow, for tasks that are right or wrong."""
    return math.ceil(_Z_SQUARED * mean * (1 - mean) / half_width**2)


def log_evidence(mean: Any, total: Any, n: Any, weight: float) -> Any:
    """Computes the logarithm of the mixture's ratio against a candidate mean; arrays are broadcast.

    Args:
        mean: Candidate mean, above 0 and below 1.
        total: Sum of the values.
        n: Number of values.
        weight: Weight of the prior.
    """
    import numpy as np
    from scipy.special import betaln

    prior = weight * mean, weight * (1 - mean)
    ratio = betaln(prior[0] + total, prior[1] + n - total) - betaln(*prior)
    return ratio - total * np.log(mean) - (n - total) * np.log1p(-mean)


def sequence_interval(total: Any, n: Any, weight: float) -> tuple[Any, Any]:
    """Computes the interval of the sequence after ``n`` values; arrays are broadcast.

    Args:
        total: Sum of the values, each within 0 and 1.
        n: Number of values, at least 1.
        weight: Weight of the prior, see :func:`prior_weight`.

    Returns:
        Lower and upper bound.
    """
    import numpy as np

    total, n = np.asarray(total, dtype=float), np.asarray(n, dtype=float)
    limit = math.log(1 / (1 - CONFIDENCE))
    middle = np.clip(total / n, _EDGE, 1 - _EDGE)
    bounds = []
    for edge in (_EDGE, 1 - _EDGE):
        outside, inside = np.full_like(middle, edge), middle.copy()
        for _ in range(_HALVINGS):
            between = (outside + inside) / 2
            refused = log_evidence(between, total, n, weight) >= limit
            outside, inside = np.where(refused, between, outside), np.where(refused, inside, between)
        bounds.append(outside)
    low = np.where(total <= 0, 0.0, bounds[0])
    high = np.where(total >= n, 1.0, bounds[1])
    return (low.item(), high.item()) if low.ndim == 0 else (low, high)
