"""Takes the loss away from tokens that are older than the staleness bound (``rollout.stale=mask``).

Guarantees: a masked token is like one that no policy sampled: it stands in the input of later tokens, has no term in
any loss, the critic's included, and counts in no denominator. Rewards, turns and values are those of the whole episode,
so the advantages of the other tokens do not change.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.train.branches import Branch, TokenColumns

Bools = NDArray[np.bool_]


def fresh_tokens(versions: NDArray[np.int32], oldest: int | None) -> Bools:
    """Returns bool ``[sampled]``: which tokens carry a loss.

    Args:
        versions: int32 ``[sampled]`` policy version that sampled each token.
        oldest: Oldest version whose tokens carry a loss; ``None`` for all.
    """
    return np.ones(len(versions), bool) if oldest is None else versions >= oldest


def with_loss(branches: Sequence[Branch], tokens: TokenColumns, fresh: Bools) -> list[Branch]:
    """Returns the branches that train a fresh token; messages without one are no longer trained."""
    if fresh.all():
        return list(branches)
    before = np.concatenate([[0], np.cumsum(fresh)])[tokens.sampled_starts]
    any_fresh = np.diff(before) > 0
    found = [
        replace(branch, trained=tuple(own and bool(any_fresh[at]) for at, own in _trained(branch)))
        for branch in branches
    ]
    return [branch for branch in found if any(branch.trained)]


def masked(tokens: TokenColumns, fresh: Bools) -> TokenColumns:
    """Returns the tokens of a whole batch, of which only the fresh ones count as sampled."""
    if fresh.all():
        return tokens
    loss_mask = tokens.loss_mask.copy()
    loss_mask[loss_mask] = fresh
    starts = np.concatenate([[0], np.cumsum(fresh)])[tokens.sampled_starts]
    return replace(
        tokens,
        sampled_starts=starts,
        loss_mask=loss_mask,
        sampled={name: values[fresh] for name, values in tokens.sampled.items()},
        places=starts[:-1],
        total=int(starts[-1]),
    )


def _trained(branch: Branch) -> list[tuple[int, bool]]:
    return list(zip(branch.messages, branch.trained, strict=True))
