"""Advantages from rewards, by group identity.

Guarantees: an advantage depends on the rewards that carry the same group key and on nothing else: not on order,
position, batch size or padding. A group without spread, or of one episode, gives 0, never NaN.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

EPSILON = 1e-6  # keeps a group of nearly equal rewards from exploding; the published formula has 0 or 1e-4 here


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, normalize_by_std: bool = True, epsilon: float = EPSILON
) -> list[float]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3; unbiased standard deviation).

    Args:
        rewards: ``[episodes]`` scalar rewards.
        groups: ``[episodes]`` group key of each, e.g. ``(group_id, role)``.
        normalize_by_std: Divide by the group's standard deviation; ``False`` is Dr. GRPO (arXiv:2503.20783).
        epsilon: Added to the standard deviation.

    Returns:
        ``[episodes]`` advantages.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(groups):
        members[key].append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [rewards[i] for i in indices]
        if len(values) < 2 or max(values) == min(values):
            continue
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
        scale = 1.0 / (std + epsilon) if normalize_by_std else 1.0
        for i in indices:
            advantages[i] = (rewards[i] - mean) * scale
    return advantages
