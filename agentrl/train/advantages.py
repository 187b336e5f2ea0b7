"""Advantage functions: from rewards to credit, within a group or along the turns of an episode.

Guarantees: unless ``scale_rewards=batch``, an advantage depends only on the rewards with the same group key and on the
episode's own turns and values; never on order, position or padding. A group whose rewards are all equal, or that has
one episode, gives 0, never NaN.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.config.declarations import advantage, preset
from agentrl.train.returns import Scored, advantage_estimates, returns_to_go
from agentrl.train.token_penalties import along_turn, penalty_returns

if TYPE_CHECKING:
    from agentrl.config.algorithm import RewardScale
    from agentrl.config.recipe import TrainerConfig

EPSILON = 1e-6  # bounds the advantages of a group with nearly equal rewards; published formulas have 0 or 1e-4 here

Credit = float | Sequence[float | Sequence[float]]
"""Credit of one role's episode: one number, or a list with, for each turn, a number or one number per sampled token."""


class Advantage(Protocol):
    """An advantage function, which ``trainer.advantage`` selects."""

    def __call__(self, scored: Sequence[Scored], config: "TrainerConfig") -> Sequence[Credit]:
        """Computes the credit of each entry: a number that all its tokens get, or a number for each turn or token."""
        ...


@advantage("group", formula="R_i - mean(R of the group)")
def group(scored: Sequence[Scored], config: "TrainerConfig") -> list[float]:
    """The advantage ``group``: rewards minus the group's mean reward, see :func:`group_advantages`."""
    return group_advantages([s.reward for s in scored], [s.group for s in scored], scale=config.scale_rewards)


DR_GRPO = preset(__name__, "dr_grpo", "Liu et al. 2025, arXiv:2503.20783", scale_rewards="none", aggregation="constant")
REINFORCE_PP_BASELINE = preset(
    __name__,
    "reinforce_pp_baseline",
    "Hu et al. 2025, arXiv:2501.03262",
    scale_rewards="none",
    whiten="batch",
    aggregation="token",
)
LITE_PPO = preset(__name__, "lite_ppo", "Liu et al. 2025, arXiv:2508.08221", scale_rewards="batch", aggregation="token")
MAXRL = preset(__name__, "maxrl", "Tajwar et al. 2026, arXiv:2602.02710", scale_rewards="mean", aggregation="token")


@advantage("leave_one_out", formula="R_i - mean(R of the group's others)")
def leave_one_out(scored: Sequence[Scored], config: "TrainerConfig") -> list[float]:
    """The advantage ``leave_one_out``: the reward minus the mean reward of the group's other episodes.

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 7. The only episode of a group gets 0.
    """
    rewards, groups = [s.reward for s in scored], [s.group for s in scored]
    sizes = Counter(groups)
    centered = group_advantages(rewards, groups, scale=config.scale_rewards)
    # r_i minus the mean of the others is n / (n - 1) times r_i minus the mean of all
    return [value * sizes[key] / max(sizes[key] - 1, 1) for value, key in zip(centered, groups, strict=True)]


RLOO = preset(
    __name__,
    "rloo",
    "Ahmadian et al. 2024, arXiv:2402.14740",
    advantage="leave_one_out",
    scale_rewards="none",
    objective="policy_gradient",
    aggregation="sum",
)


@advantage("reward", formula="R_i", token_penalties=True)
def reward(scored: Sequence[Scored], config: "TrainerConfig") -> "Sequence[Credit]":
    """The advantage ``reward``: the reward itself, without a baseline (REINFORCE).

    With ``scale_rewards=batch`` it is divided by the standard deviation over the batch, and is 0 if all rewards are
    equal. With KL penalties a token's advantage is the reward minus the penalties from that token on (REINFORCE++, Hu
    et al. 2025, arXiv:2501.03262).
    """
    rewards = [s.reward for s in scored]
    divisor = _divisor(rewards, rewards, "batch", EPSILON) if config.scale_rewards == "batch" else 1.0
    if not any(turn.penalties for one in scored for turn in one.turns):
        return [value / divisor for value in rewards]
    return [
        [
            along_turn((one.reward - cost) / divisor, turn, divisor)
            for turn, cost in zip(one.turns, penalty_returns(one), strict=True)
        ]
        for one in scored
    ]


REINFORCE = preset(
    __name__,
    "reinforce",
    "Williams 1992",
    advantage="reward",
    scale_rewards="none",
    objective="policy_gradient",
    aggregation="sum",
)
REINFORCE_PP = preset(
    __name__,
    "reinforce_pp",
    "Hu et al. 2025, arXiv:2501.03262",
    advantage="reward",
    scale_rewards="none",
    whiten="batch",
    aggregation="token",
)


@advantage("none", formula="0")
def none(scored: Sequence[Scored], config: "TrainerConfig") -> list[float]:
    """The advantage ``none``: rewards are ignored, so only a teacher gives advantages."""
    return [0.0] * len(scored)


DISTILL = preset(
    __name__,
    "distill",
    "Lu and Thinking Machines Lab 2025, On-Policy Distillation; Agarwal et al. 2024 (GKD), arXiv:2306.13649",
    advantage="none",
    scale_rewards="none",
    distill_coef=1.0,
    objective="policy_gradient",
    aggregation="token",
)


@advantage("turns", formula="G_k - mean(G over the turns of the group)", token_penalties=True)
def turns(scored: Sequence[Scored], config: "TrainerConfig") -> "Sequence[Credit]":
    """The advantage ``turns``: the return of each turn minus the mean return over all turns of the group.

    The return of a turn is its reward plus ``discount`` times the return of the next turn in time, or at a fork the
    mean of those (:func:`agentrl.train.turn_order.followers`). With one turn per episode it equals ``group``. It
    follows the process supervision of Shao et al. 2024, arXiv:2402.03300, section 4.1.3, which centers rewards and then
    sums them. Here returns are centered instead, so that an advantage does not depend on the number of turns of its
    episode. With KL penalties a turn's return is that of its first token, and the return of each later token lacks the
    penalties of the tokens before it.
    """
    returns = [returns_to_go(one, config.discount) for one in scored]
    alone = Counter(one.group for one in scored)
    flat = [value for one in returns for value in one]
    keys = [one.group for one in scored for _ in one.turns]
    values = iter(group_advantages(flat, keys, scale=config.scale_rewards))
    divisors = group_divisors(flat, keys, config.scale_rewards, EPSILON)
    spread = [[along_turn(next(values), turn, divisors[one.group]) for turn in one.turns] for one in scored]
    return [[0.0] * len(v) if alone[one.group] < 2 else v for one, v in zip(scored, spread, strict=True)]


@advantage("gae", formula="sum_j (gamma lambda)^j delta_t+j", token_penalties=True)
def gae(scored: Sequence[Scored], config: "TrainerConfig") -> list[list[list[float]]]:
    """The advantage ``gae``: generalised advantage estimates of each sampled token.

    Schulman et al. 2016, arXiv:1506.02438, eq. 16. Only sampled tokens are steps; the environment's tokens between them
    are skipped. A turn's reward comes with its last token, a KL penalty with its own token, and the value after a turn
    is that of the next turn's first token, in time. A role that was cut is bootstrapped with the critic's value of its
    end. At a fork, values and advantages of the turns that follow are averaged.

    Raises:
        ValueError: There is no critic.
    """
    return [advantage_estimates(one, config.discount, config.gae_lambda) for one in scored]


PPO = preset(
    __name__,
    "ppo",
    "Schulman et al. 2017, arXiv:1707.06347, with generalised advantages, arXiv:1506.02438",
    advantage="gae",
    scale_rewards="none",
    whiten="batch",
    aggregation="token",
)


def token_credit(credit: Credit, one: Scored) -> NDArray[np.float64]:
    """Expands an entry's credit to token credit, ``[sampled tokens]``, turn by turn.

    Raises:
        ValueError: The credit does not fit the entry's turns and tokens, or is not finite.
    """
    counts = [turn.tokens for turn in one.turns]
    if isinstance(credit, int | float):
        found = np.full(sum(counts), float(credit))
    else:
        if len(credit) != len(counts):
            raise ValueError(f"{len(credit)} numbers for {len(counts)} turns")
        parts = [_of_turn(value, count) for value, count in zip(credit, counts, strict=True)]
        found = np.concatenate(parts) if parts else np.empty(0)
    if not np.isfinite(found).all():
        raise ValueError(f"{float(found[~np.isfinite(found)][0])!r}; want finite numbers")
    return found


def _of_turn(value: float | Sequence[float], tokens: int) -> NDArray[np.float64]:
    if isinstance(value, int | float):
        return np.full(tokens, float(value))
    if len(value) != tokens:
        raise ValueError(f"{len(value)} numbers for a turn of {tokens} sampled tokens")
    return np.asarray(value, np.float64)


def whitened(values: NDArray[np.float64], *, epsilon: float = EPSILON) -> NDArray[np.float64]:
    """Whitens values: mean 0 and (unbiased) standard deviation 1; zeros if all values are equal.

    Args:
        values: ``[tokens]`` advantages of a batch.
        epsilon: Number added to the standard deviation.
    """
    if len(values) < 2 or values.min() == values.max():
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    scale: "RewardScale" = "group",
    epsilon: float = EPSILON,
) -> list[float]:
    """Computes group-relative advantages.

    GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3, with the unbiased standard deviation.

    Args:
        rewards: ``[episodes]`` scalar rewards.
        groups: ``[episodes]`` group keys, e.g. ``(group_id, role)``.
        scale: Divisor of the centered reward: ``group``, the group's standard deviation; ``batch``, the standard
            deviation of all given rewards (LitePPO, Liu et al. 2025, arXiv:2508.08221); ``mean``, the group's mean
            reward, which gives rarely solved tasks more weight (MaxRL, Tajwar et al. 2026, arXiv:2602.02710); or
            ``none``, 1 (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        epsilon: Number added to the standard deviation.

    Raises:
        ValueError: A reward is negative with ``mean``: dividing by a negative mean would flip the advantages' signs.

    Returns:
        ``[episodes]`` advantages.
    """
    divisors = group_divisors(rewards, groups, scale, epsilon)
    means = {key: sum(values) / len(values) for key, values in _by_group(rewards, groups).items()}
    return [(value - means[key]) / divisors[key] for value, key in zip(rewards, groups, strict=True)]


def group_divisors(
    rewards: Sequence[float], groups: Sequence[Hashable], scale: "RewardScale", epsilon: float
) -> dict[Hashable, float]:
    """Returns each group's divisor; infinite for a group without spread. Arguments as in :func:`group_advantages`."""
    return {key: _divisor(own, rewards, scale, epsilon) for key, own in _by_group(rewards, groups).items()}


def _by_group(rewards: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, list[float]]:
    found: dict[Hashable, list[float]] = defaultdict(list)
    for value, key in zip(rewards, groups, strict=True):
        found[key].append(value)
    return found


def _divisor(values: Sequence[float], of_batch: Sequence[float], scale: "RewardScale", epsilon: float) -> float:
    if not values or max(values) == min(values):
        return math.inf
    if scale == "none":
        return 1.0
    if scale == "mean":
        if min(values) < 0:
            raise ValueError(
                f"trainer.scale_rewards=mean needs rewards of at least 0, but one reward is {min(values):g}"
            )
        return sum(values) / len(values)
    return _deviation(of_batch if scale == "batch" else values) + epsilon


def _deviation(values: Sequence[float]) -> float:
    """Returns the unbiased standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
