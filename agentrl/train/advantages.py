"""Advantages from rewards, by group identity.

Guarantees: an advantage depends on the rewards that carry the same group key and on nothing else: not on order,
position, batch size or padding. A group without spread, or of one episode, gives 0, never NaN.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.config.algorithm import RewardScale
from agentrl.config.recipe import TrainerConfig

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


def leave_one_out(scored: Sequence[Scored], config: TrainerConfig) -> list[float]:
    """The advantage ``leave_one_out``: rewards relative to the mean of the group's others.

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 7. An episode without others gets 0.
    """
    rewards, groups = [s.reward for s in scored], [s.group for s in scored]
    sizes = Counter(groups)
    centered = group_advantages(rewards, groups, scale=config.scale_rewards)
    # r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all
    return [value * sizes[key] / max(sizes[key] - 1, 1) for value, key in zip(centered, groups, strict=True)]


def reward(scored: Sequence[Scored], config: TrainerConfig) -> list[float]:
    """The advantage ``reward``: the reward itself, without a baseline (REINFORCE).

    Divided by the deviation over the batch where ``scale_rewards=batch``.
    """
    rewards = [s.reward for s in scored]
    divisor = _deviation(rewards) + EPSILON if config.scale_rewards == "batch" else 1.0
    return [value / divisor for value in rewards]


def whitened(values: Sequence[float], counts: Sequence[int], *, epsilon: float = EPSILON) -> list[float]:
    """Values brought to mean 0 and (unbiased) deviation 1 over all tokens of a batch.

    Args:
        values: One for each entry.
        counts: Tokens that share it.
        epsilon: Added to the deviation.
    """
    total = sum(counts)
    if total < 2:
        return [0.0] * len(values)
    mean = sum(v * n for v, n in zip(values, counts, strict=True)) / total
    variance = sum((v - mean) ** 2 * n for v, n in zip(values, counts, strict=True)) / (total - 1)
    return [(v - mean) / (variance**0.5 + epsilon) if v != mean else 0.0 for v in values]


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
        scale: What the centered reward is divided by: ``group``, the group's standard deviation; ``batch``, that of
            all rewards given (LitePPO, Liu et al. 2025, arXiv:2508.08221); ``mean``, the group's mean reward, which
            weighs a task by how rarely it is solved (MaxRL, Tajwar et al. 2026, arXiv:2602.02710); or ``none``, nothing
            (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
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
    of_batch = _deviation(rewards) + epsilon
    for indices in members.values():
        values = [rewards[i] for i in indices]
        if len(values) < 2 or max(values) == min(values):
            continue
        mean = sum(values) / len(values)
        for i in indices:
            divisor = of_batch if scale == "batch" else _divisor(values, mean, scale, epsilon)
            advantages[i] = (rewards[i] - mean) / divisor
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
    return _deviation(values) + epsilon


def _deviation(values: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
