"""Advantages from rewards, by group identity.

Guarantees: an advantage depends on the rewards that carry the same group key and on nothing else: not on order,
position, batch size or padding. A group without spread, or of one episode, gives 0, never NaN.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

from agentrl.config.recipe import RewardScale

EPSILON = 1e-6  # keeps a group of nearly equal rewards from exploding; the published formula has 0 or 1e-4 here


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    scale: RewardScale = "group",
    epsilon: float = EPSILON,
) -> list[float]:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3; unbiased standard deviation).

    Args:
        rewards: ``[episodes]`` scalar rewards.
        groups: ``[episodes]`` group key of each, e.g. ``(group_id, role)``.
        scale: What the centered reward is divided by: ``group``, the group's standard deviation; ``mean``, its mean
            reward, which weighs a task by how rarely it is solved (MaxRL, Tajwar et al. 2026, arXiv:2602.02710); or
            ``none``, nothing (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        epsilon: Added to the standard deviation.

    Raises:
        ValueError: A negative reward with ``mean``, which would turn signs round.

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
        for i in indices:
            advantages[i] = (rewards[i] - mean) / _divisor(values, mean, scale, epsilon)
    return advantages


def _divisor(values: Sequence[float], mean: float, scale: RewardScale, epsilon: float) -> float:
    if scale == "none":
        return 1.0
    if scale == "mean":
        if min(values) < 0:
            raise ValueError(
                f"trainer.scale_rewards=mean needs rewards of at least 0, and there is one of {min(values):g}"
            )
        return mean
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 + epsilon
