"""Advantages from rewards, by group identity or along the turns of an episode.

Guarantees: an advantage depends on the rewards that carry the same group key, on the episode's own turns and values,
and on nothing else: not on order, position, batch size or padding. A group without spread, or of one episode, gives 0,
never NaN.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.config.declarations import advantage, preset

if TYPE_CHECKING:
    from agentrl.config.algorithm import RewardScale
    from agentrl.config.recipe import TrainerConfig

EPSILON = 1e-6  # keeps a group of nearly equal rewards from exploding; the published formula has 0 or 1e-4 here

Credit = float | Sequence[float | Sequence[float]]
"""What an entry gets: one number, or one for each turn, which may be one for each token that was sampled in it."""


@dataclass(frozen=True)
class Turn:
    """One sampled message.

    Attributes:
        parent: Index of the turn before it on its branch, ``None`` at a root.
        tokens: Number of its sampled tokens.
        reward: Reward of the environment step that it was the action of, scaled; ``None`` where there was none.
        values: ``[tokens]`` the critic's values before each sampled token; empty without a critic.
        after: The critic's value of what would have followed, where a limit cut the episode off here; else 0.
    """

    parent: int | None
    tokens: int
    reward: float | None = None
    values: tuple[float, ...] = ()
    after: float = 0.0


@dataclass(frozen=True)
class Scored:
    """Rewards of one role of one episode.

    Attributes:
        group: Key of the episodes it is compared with: ``(group_id, role)``.
        reward: Reward of the whole episode, scaled, shifted and clipped as the recipe's reward section says.
        turns: The messages it sampled, in order; a fork shows in their parents.
        terminated: The task ended by itself; where not, it was truncated by a limit and a value may follow.
    """

    group: tuple[str, str]
    reward: float
    turns: tuple[Turn, ...]
    terminated: bool

    @property
    def step_rewards(self) -> tuple[float | None, ...]:
        """The environment's reward for each turn."""
        return tuple(turn.reward for turn in self.turns)

    def children(self) -> list[list[int]]:
        """For each turn, the turns that follow it: none at the end of a branch, several at a fork."""
        found: list[list[int]] = [[] for _ in self.turns]
        for index, turn in enumerate(self.turns):
            if turn.parent is not None:
                found[turn.parent].append(index)
        return found

    def rewards(self) -> list[float]:
        """The reward of each turn; what steps did not give of the episode's reward comes at the end of each branch."""
        rest = self.reward - sum(turn.reward or 0.0 for turn in self.turns)
        ends = [not after for after in self.children()]
        return [(turn.reward or 0.0) + rest * end for turn, end in zip(self.turns, ends, strict=True)]


class Advantage(Protocol):
    """Interface of ``trainer.advantage``."""

    def __call__(self, scored: Sequence[Scored], config: "TrainerConfig") -> Sequence[Credit]:
        """The credit of each entry: a number that its tokens share, or one for each turn or token."""
        ...


@advantage("group", formula="R_i - mean(R of the group)")
def group(scored: Sequence[Scored], config: "TrainerConfig") -> list[float]:
    """The advantage ``group``: rewards relative to the group's, see :func:`group_advantages`."""
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
    """The advantage ``leave_one_out``: rewards relative to the mean of the group's others.

    RLOO, Ahmadian et al. 2024, arXiv:2402.14740, eq. 7. An episode without others gets 0.
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


@advantage("reward", formula="R_i")
def reward(scored: Sequence[Scored], config: "TrainerConfig") -> list[float]:
    """The advantage ``reward``: the reward itself, without a baseline (REINFORCE).

    Divided by the deviation over the batch where ``scale_rewards=batch``.
    """
    rewards = [s.reward for s in scored]
    divisor = _deviation(rewards) + EPSILON if config.scale_rewards == "batch" else 1.0
    return [value / divisor for value in rewards]


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
    """The advantage ``none``: rewards do not count, what else gives advantages (a teacher) acts alone."""
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


@advantage("turns", formula="G_k - mean(G over the turns of the group)")
def turns(scored: Sequence[Scored], config: "TrainerConfig") -> list[list[float]]:
    """The advantage ``turns``: what each turn and those after it earned, relative to all turns of the group.

    The return of a turn is its own reward plus ``discount`` times that of the turn that follows it, or at a fork the
    mean of those. One turn an episode gives ``group``. After process supervision in Shao et al. 2024, arXiv:2402.03300,
    section 4.1.3, which centers rewards before it adds them up; here it is the returns, so that an episode's number of
    turns shifts none.
    """
    returns = [returns_to_go(one, config.discount) for one in scored]
    alone = Counter(one.group for one in scored)
    flat = [value for one in returns for value in one]
    keys = [one.group for one in scored for _ in one.turns]
    values = iter(group_advantages(flat, keys, scale=config.scale_rewards))
    spread = [[next(values) for _ in one.turns] for one in scored]
    return [[0.0] * len(v) if alone[one.group] < 2 else v for one, v in zip(scored, spread, strict=True)]


def returns_to_go(one: Scored, discount: float) -> list[float]:
    """``[turns]`` the reward of each turn plus ``discount`` times what follows along its branch."""
    rewards, children = one.rewards(), one.children()
    found = [0.0] * len(rewards)
    for index in reversed(range(len(rewards))):
        found[index] = rewards[index] + discount * _mean([found[child] for child in children[index]])
    return found


@advantage("gae", formula="sum_j (gamma lambda)^j delta_t+j")
def gae(scored: Sequence[Scored], config: "TrainerConfig") -> list[list[list[float]]]:
    """The advantage ``gae``: generalised advantage estimates of each sampled token.

    Schulman et al. 2016, arXiv:1506.02438, eq. 16. Only sampled tokens are steps: what the environment said between
    them is passed over. A turn's reward comes with its last token; a branch that a limit cut off goes on with the
    critic's value of its end. At a fork, the mean of what follows.

    Raises:
        ValueError: There is no critic.
    """
    return [_gae(one, config.discount, config.gae_lambda) for one in scored]


PPO = preset(
    __name__,
    "ppo",
    "Schulman et al. 2017, arXiv:1707.06347, with generalised advantages, arXiv:1506.02438",
    advantage="gae",
    scale_rewards="none",
    whiten="batch",
    aggregation="token",
)


def _gae(one: Scored, discount: float, decay: float) -> list[list[float]]:
    rewards, children = one.rewards(), one.children()
    found: list[list[float]] = [[] for _ in one.turns]
    starts = [(0.0, 0.0)] * len(one.turns)  # value and advantage before a turn's first token
    for index in reversed(range(len(one.turns))):
        turn = one.turns[index]
        if len(turn.values) != turn.tokens:
            raise ValueError("trainer.advantage=gae needs a critic's value of each sampled token")
        after = [starts[child] for child in children[index]]
        value = _mean([v for v, _ in after]) if after else turn.after
        carry = _mean([a for _, a in after])
        earned = rewards[index]
        for before in reversed(turn.values):
            carry = earned + discount * value - before + discount * decay * carry
            value, earned = before, 0.0
            found[index].append(carry)
        found[index].reverse()
        starts[index] = value, carry
    return found


def token_credit(credit: Credit, one: Scored) -> NDArray[np.float64]:
    """``[sampled tokens]`` an entry's credit, turn by turn.

    Raises:
        ValueError: It has another shape, or is not finite.
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
    """Values brought to mean 0 and (unbiased) deviation 1.

    Args:
        values: ``[tokens]`` of a batch.
        epsilon: Added to the deviation.
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
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3; unbiased standard deviation).

    Args:
        rewards: ``[episodes]`` scalar rewards.
        groups: ``[episodes]`` group key of each, e.g. ``(group_id, role)``.
        scale: Divisor of the centered reward: ``group``, the group's standard deviation; ``batch``, that of
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


def _divisor(values: Sequence[float], mean: float, scale: "RewardScale", epsilon: float) -> float:
    if scale == "none":
        return 1.0
    if scale == "mean":
        if min(values) < 0:
            raise ValueError(
                f"trainer.scale_rewards=mean needs rewards of at least 0, and there is one of {min(values):g}"
            )
        return mean
    return _deviation(values) + epsilon


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
