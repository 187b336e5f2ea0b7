"""Advantages from rewards, by group identity.

Guarantees: an advantage depends on the rewards that carry the same group key and on nothing else: not on order,
position, batch size or padding. A group without spread, or of one episode, gives 0, never NaN.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.config.recipe import RewardScale, TrainerConfig

EPSILON = 1e-6  # keeps a group of nearly equal rewards from exploding; the published formula has 0 or 1e-4 here


@dataclass(frozen=True)
class Scored:
    """What one role of one episode earned.

    Attributes:
        group: Key of the episodes it is compared with: ``(group_id, role)``.
        reward: Of the whole episode, as the recipe's reward section has the trainer see it.
        step_rewards: The environment's reward for each sampled message, in order; ``None`` where there was none.
        terminated: The task ended by itself; where not, it was truncated by a limit and a value may follow.
    """

    group: tuple[str, str]
    reward: float
    step_rewards: tuple[float | None, ...]
    terminated: bool


class Advantage(Protocol):
    """What ``trainer.advantage`` names."""

    def __call__(self, scored: Sequence[Scored], config: TrainerConfig) -> Sequence[float]:
        """One advantage for each entry; the tokens of an entry share it.

        Every rank calls it with the same arguments and must get the same answer.
        """
        ...


def group(scored: Sequence[Scored], config: TrainerConfig) -> list[float]:
    """The advantage ``group``: rewards relative to the group's, see :func:`group_advantages`."""
    return group_advantages([s.reward for s in scored], [s.group for s in scored], scale=config.scale_rewards)


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
