"""Chooses a sample of the branches that a step would not compute before its first update, to measure metrics on.

Guarantees: the weighted sum over the sample's tokens is an unbiased estimate of the sum over the tokens of all given
branches, and the weights sum to their number; the choice depends only on the branches, the budget and the version, not
on ranks or micro-batches; the computed tokens stay within the budget, or it is one branch.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentrl.train.branches import Branch, TokenColumns, input_length, trained_count

_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly: every branch gets its turn over the steps


def sample_branches(branches: Sequence[Branch], tokens: TokenColumns, budget: float, version: int) -> list[Branch]:
    """Draws branches with a probability in proportion to their trained tokens; all of them if the budget allows.

    Systematic sampling (Madow 1949, On the Theory of Systematic Sampling, II): points at equal distances lie on the
    line of all trained tokens, and a branch is drawn if one lies in it. The inverse of its expected number of points
    is the weight that makes sums unbiased (Horvitz and Thompson 1952, eq. 6).

    Args:
        branches: Branches to draw from.
        tokens: Token columns that the branches index.
        budget: Largest expected number of computed tokens; at least one branch is drawn.
        version: Policy version that the step starts from, which moves the points.

    Returns:
        The drawn branches in order; ``weight`` is the weight of each of their tokens in a sum.
    """
    counts = np.array([trained_count(branch, tokens) for branch in branches], np.float64)
    if not counts.sum():
        return []
    lengths = np.array([input_length(branch, tokens) for branch in branches], np.float64)
    if lengths.sum() <= budget:
        return [replace(branch, weight=1.0) for branch in branches]
    ends = counts.cumsum()
    each = float((counts * lengths).sum() / ends[-1])  # expected tokens to compute for one point
    points = max(1, int(budget / each))
    distance = ends[-1] / points
    at = (np.arange(points) + version * _GOLDEN % 1.0) * distance
    drawn = np.bincount(np.searchsorted(ends, at, side="right"), minlength=len(branches))
    weights = drawn * distance / counts
    return [replace(branches[index], weight=float(weights[index])) for index in np.flatnonzero(drawn).tolist()]


def tokens_to_compute(branches: Sequence[Branch], tokens: TokenColumns) -> int:
    """Counts the tokens that must at least be computed for some branches, if each group has one longest prompt."""
    prompts: dict[int, int] = {}
    total = 0
    for branch in branches:
        trained = trained_count(branch, tokens)
        prompts[branch.group] = max(prompts.get(branch.group, 0), input_length(branch, tokens) - trained)
        total += trained
    return total + sum(prompts.values())
